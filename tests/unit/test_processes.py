"""Whether a process is in the control groups of another one."""

import pytest

from dlrover_py.process.identity import is_within


@pytest.mark.parametrize(
    ("theirs", "ours", "good"),
    [
        (["0::/a/b"], ["0::/a/b"], True),
        (["0::/a/b/c"], ["0::/a/b"], True),
        (["0::/a/bc"], ["0::/a/b"], False),
        (["0::/a"], ["0::/a/b"], False),
        (["0::/a/b"], ["0::/"], True),
        (["0::/../b"], ["0::/"], False),
        (["2:cpu:/a", "1:pids:/"], ["2:cpu:/a", "1:pids:/"], True),
        (["2:cpu:/a", "1:pids:/x"], ["2:cpu:/b", "1:pids:/"], False),
        (["0::/"], [], False),
        ([], [], True),
    ],
)
def test_control_groups_that_are_ours(theirs: list[str], ours: list[str], good: bool) -> None:
    def coded(lines: list[str]) -> list[bytes]:
        return [line.encode() for line in lines]

    assert is_within(coded(theirs), coded(ours)) is good
