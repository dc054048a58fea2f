"""The operator: it makes the master of each ElasticJob and keeps it running.

The master makes the worker Pods; the operator never does.
"""
