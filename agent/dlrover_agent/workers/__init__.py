"""The worker processes of one node: their start, supervision, output, failures and end."""
