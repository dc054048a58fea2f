"""A campaign of random faults against jobs on a real cluster (``make chaos``).

``plan`` draws the faults (pure). ``strike`` injects them. ``worker`` is the script of the jobs,
which writes a line for each step. ``check`` checks the invariants (pure). ``score`` computes
recoveries and goodput (pure). ``campaign`` combines them.
"""
