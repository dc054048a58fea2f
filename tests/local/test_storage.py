"""Writers of a checkpoint directory on this host that have died."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover_py.checkpoint.directory import (
    LEASE_FILE,
    LEASE_S,
    CheckpointDirectory,
    DirectoryClaimedError,
)
from tests.programs import PROGRAMS
from tests.unit.test_storage import ONE, OTHER, Clock, store  # noqa: F401 - a fixture

DIES = str(PROGRAMS / "claim_directory.py")
"""A program that claims a directory, and ends."""


@pytest.fixture
def dead_writer(store: CheckpointDirectory) -> CheckpointDirectory:
    """A claim of a process of this host that has ended."""
    subprocess.run([sys.executable, DIES, store.place.url], check=True)
    assert store.place.names() == [LEASE_FILE]
    return store


def test_the_dead_of_this_host_are_followed_at_once(dead_writer: CheckpointDirectory) -> None:
    dead_writer.acquire_lease(ONE, "a1")
    assert json.loads(dead_writer.place.read(LEASE_FILE))["job"] == "u1"


def test_the_dead_of_this_host_are_not_followed_at_once_if_others_of_their_job_may_live(
    tmp_path: Path,
) -> None:
    clock = Clock()
    subprocess.run([sys.executable, DIES, str(tmp_path), "shared"], check=True)
    stranger, other = (
        CheckpointDirectory(tmp_path, clock=clock),
        CheckpointDirectory(tmp_path, clock=clock),
    )
    with pytest.raises(DirectoryClaimedError) as told:
        stranger.acquire_lease(ONE)
    assert not told.value.is_alive
    other.join(OTHER)
    assert other.renew_lease(), "that it is dead is known here"
    clock.now += LEASE_S + 1
    with pytest.raises(DirectoryClaimedError) as told:
        stranger.acquire_lease(ONE)
    assert told.value.is_alive
