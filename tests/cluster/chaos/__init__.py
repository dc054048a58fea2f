"""A campaign of random faults against jobs on a real cluster (``make chaos``).

``plan`` draws the faults (pure), ``strike`` does them, ``worker`` is what the jobs run and what
tells of them, ``check`` holds what must be true all the time (pure), ``score`` counts (pure), and
``campaign`` puts them together.
"""
