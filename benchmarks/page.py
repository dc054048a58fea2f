"""The page of benchmarks, docs/benchmarks.md, whose tables the benchmarks write."""

from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"


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
