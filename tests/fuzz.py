"""Coverage-guided fuzzing of whatever parses what comes from outside::

    python -m tests.fuzz [NAME ...] --seconds 60

The parsers are those of tests/unit/test_parsers.py, each in a process of its own. atheris
(libFuzzer) sees which lines of ours an input reaches; Hypothesis makes documents of its bytes with
something odd in them, since nearly all that flipped bytes make of JSON is refused by the first
comma. What a parser must not raise ends its process, and is told with its input.
"""

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import atheris
from hypothesis import given, settings
from hypothesis import strategies as st

with atheris.instrument_imports(include=["dlrover_py", "dlrover_agent"]):
    from tests.unit.test_parsers import TARGETS, changed, little_room


def fuzz(name: str, seconds: int, folder: str) -> None:
    """Look for something that this parser cannot take, for so long. Ends the process."""
    target = TARGETS[name]

    @settings(database=None, deadline=None)
    @given(data=changed(target.seeds) | st.binary(max_size=200))
    def tried(data: bytes) -> None:
        try:
            with little_room(), contextlib.suppress(*target.says):
                target.parse(data)
        except BaseException:
            print(f"{name} cannot take {data!r}", file=sys.stderr, flush=True)
            raise

    options = [f"-max_total_time={seconds}", "-max_len=4096", f"-artifact_prefix={folder}/"]
    atheris.Setup([sys.argv[0], *options], tried.hypothesis.fuzz_one_input)
    atheris.Fuzz()


def alone(name: str, seconds: int) -> tuple[int, str]:
    """The same in a process of its own: how it ended, and what it said."""
    folder = Path(tempfile.mkdtemp())  # not a context: it would end in the child too
    said = folder / "said"
    pid = os.fork()
    if not pid:
        out = os.open(said, os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        try:
            fuzz(name, seconds, str(folder))
        finally:
            os._exit(70)
    _, status = os.waitpid(pid, 0)
    words = said.read_text(errors="replace")
    shutil.rmtree(folder)
    return os.waitstatus_to_exitcode(status), words


def main() -> int:
    """All of them, or some, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=int, default=60, help="for each")
    args = parser.parse_args()
    if unknown := set(args.names) - set(TARGETS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    failed = 0
    for name in args.names or TARGETS:
        code, said = alone(name, args.seconds)
        done = next((x for x in said.splitlines() if x.startswith("Done ")), "failed")
        print(f"{name}: {done}", flush=True)
        if code:
            failed = 1
            print(said, file=sys.stderr)
    return failed


if __name__ == "__main__":
    sys.exit(main())
