"""The master's decisions, as pure code: no clock, no I/O, no environment, no logging.

``job.Job`` takes events and the time, and returns effects. It runs components, each of which
decides about one concern. They share the state in ``state``, and the events in ``history``. Below
them are modules that do not import each other: ``nodes`` (state of the nodes), ``rendezvous``
(members of the round), ``policy`` (consequences of a failure), ``health`` (node checks), ``hosts``
(bans) and ``checkpoints`` (with ``memory_index`` and ``replica_pairs``).
"""
