"""The master of one job: decides on membership, restarts and checkpoints, and records why."""
