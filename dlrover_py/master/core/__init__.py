"""The master's decisions, PURE: no clock, no I/O, no environment, no logging.

``job.Job`` takes events and the time, and returns effects; it combines ``nodes`` (who lives),
``rendezvous`` (who is in the round) and ``policy`` (what follows from a failure), which do not
know each other.
"""
