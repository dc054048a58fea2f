"""Imports the session without torch, and then what needs torch."""

import sys

import dlrover_py.trainer as t
from dlrover_py.trainer import session

assert "torch" not in sys.modules
assert session
assert "Checkpointer" in t.__all__
try:
    t.Nothing  # noqa: B018
except AttributeError as error:
    print(error)
from dlrover_py.trainer import Checkpointer  # noqa: E402, F401

assert "torch" in sys.modules
