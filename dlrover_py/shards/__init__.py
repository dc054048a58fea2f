"""Dynamic shards: the lease queue of a dataset, which gives parts of it to workers as they ask.

The package is pure: it has no clock and no I/O. The master runs the queues of a job. A script
without a master runs a queue in its own process.
"""
