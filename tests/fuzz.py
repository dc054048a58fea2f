"""Coverage-guided fuzzing of all parsers of external input::

    python -m tests.fuzz [NAME ...] --seconds 60

The parsers are those of tests/unit/test_parsers.py. Each runs in its own process. atheris
(libFuzzer) records which lines of DLRover an input reaches. Hypothesis turns its bytes into
documents with odd values, because a JSON parser refuses nearly all documents with flipped bytes at
the first comma. An unexpected error ends the process, which prints the error and the input.
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
    """Search for an input that makes a parser fail, and end the process.

    Args:
        name: name of the parser.
        seconds: time of the search.
        folder: folder for the files of libFuzzer.
    """
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
    fuzz_one = tried.hypothesis.fuzz_one_input  # type: ignore[attr-defined]  # by @given
    atheris.Setup([sys.argv[0], *options], fuzz_one)
    atheris.Fuzz()


def alone(name: str, seconds: int) -> tuple[int, str]:
    """Run :func:`fuzz` in its own process; return its exit code and its output."""
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
    """Fuzz all parsers, or those that the command line names, one after the other."""
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
