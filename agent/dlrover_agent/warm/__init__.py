"""Warm starts: workers are forked from a process that has already imported their modules."""
