"""Checkpoints of one node: write them to storage, replicate them, serve them to other nodes."""
