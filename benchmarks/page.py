"""The page of benchmarks, docs/benchmarks.md, whose tables the benchmarks write."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"


def measured_with(load: float, *libraries: str) -> str:
    """Return the line above a table: this command, its commit, the machine, versions and the date.

    Args:
        load: Load average before the measurement.
        libraries: Further libraries, with their versions.
    """
    program = Path(sys.argv[0]).name
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    versions = [f"Linux {platform.release()}", f"Python {platform.python_version()}", *libraries]
    return (
        f"`python benchmarks/{program} {' '.join(sys.argv[1:])}` at {commit.stdout.strip()}  \n"
        f"{os.cpu_count()} cores shared with other work (load average {load:.1f} before); "
        f"{', '.join(versions)}, {datetime.now(UTC):%Y-%m-%d}."
    )


def write_section(name: str, text: str) -> None:
    """Replace what stands between the markers ``<!-- name: begin -->`` and ``<!-- name: end -->``.

    Raises:
        SystemExit: The page does not contain the two markers once each.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    page = PAGE.read_text()
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    if page.count(begin) != 1 or rest.count(end) != 1:
        raise SystemExit(f"{PAGE}: expected a line {begin!r} and then a line {end!r}, once each")
    PAGE.write_text(f"{before}{begin}\n{text.strip()}\n\n{end}{after}")
