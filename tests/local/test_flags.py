"""Flags of elastic-run that are looked up in the installed torch, in a process of its own."""

import pytest

from tests.unit.test_flags import misused


def test_unknown_flag_is_named() -> None:
    assert "unknown flag --frob" in misused("--frob", "train.py")
    assert "training_script" in misused("--nnodes", "2")


@pytest.mark.parametrize("flag", ["--save", "--pre=2", "--cold", "--network", "--exclude"])
def test_our_own_flags_may_not(flag: str) -> None:
    assert f"unknown flag {flag}" in misused(flag, "train.py")
