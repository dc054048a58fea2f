"""The master of one job: who is in the round, what happens after a failure, and why."""
