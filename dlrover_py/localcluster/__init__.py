"""A job on this machine alone, with simulated nodes: what ``dlrover job run`` starts."""
