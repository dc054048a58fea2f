"""``make docs`` refuses what a reader would stumble over, or what would ask another server."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The working tree, with a copy of docs/ that a test may change."""
    for path in ROOT.iterdir():
        if path.name not in ("docs", ".site", ".git"):
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    return tmp_path


def built(tree: Path) -> tuple[int, str]:
    """The exit code and the output of ``make docs``."""
    done = subprocess.run(
        ["make", "--no-print-directory", "-o", "setup-dev", "docs", f"VENV={sys.prefix}"],
        cwd=tree,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stdout


def test_dead_links_and_pages_outside_the_menu_are_errors(tree: Path) -> None:
    with (tree / "docs/faq.md").open("a") as page:
        page.write("\n[a](nowhere.md) [b](glossary.md#nowhere)\n")
    (tree / "docs/stray.md").write_text("# Stray\n")
    code, said = built(tree)
    assert code != 0
    for part in ("'nowhere.md'", "'#nowhere'", "stray.md"):
        assert part in said, said


def test_a_page_that_asks_another_server_is_an_error(tree: Path) -> None:
    with (tree / "docs/faq.md").open("a") as page:
        page.write('\n<img alt="a" src="https://example.org/a.png">\n')
    code, said = built(tree)
    assert code != 0
    assert "faq.html: https://example.org/a.png" in said


def test_a_page_that_the_code_has_overtaken_is_an_error(tree: Path) -> None:
    with (tree / "docs/reference/settings.md").open("a") as page:
        page.write("\nBy hand.\n")
    code, said = built(tree)
    assert code != 0
    assert "settings.md; run: make docs-reference" in said
