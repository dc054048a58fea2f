"""Checkpoints: in shared memory, in a directory or bucket, and on the way between nodes."""
