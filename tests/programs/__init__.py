"""Programs that tests run in processes of their own: the type checker and the linter read them."""

import textwrap
from pathlib import Path

PROGRAMS = Path(__file__).parent
"""The folder of the programs."""
LATE_TORCH = {"TESTS_LATE_TORCH": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Environment of programs that compile nothing (scripts/late_torch.py), without NumPy's threads.

They begin with ``import torch``, in each of more processes than there are processors.
"""


def source(program: Path | str) -> str:
    """Return the text of a program, which is a file or an indented text."""
    return program.read_text() if isinstance(program, Path) else textwrap.dedent(program)
