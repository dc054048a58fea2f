"""Processes and files of this machine: identity, owner, end, memory limits, background threads."""
