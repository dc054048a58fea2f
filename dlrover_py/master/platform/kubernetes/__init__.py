"""Nodes as Pods of a Kubernetes cluster: watches, creation, deletion, and the job's status."""
