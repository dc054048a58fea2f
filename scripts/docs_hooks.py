"""Hooks of mkdocs: with them, the pages of docs/ look the same on GitHub and in the built site.

GitHub resolves links to any file of the repository, and makes anchors by a rule of its own. The
site has the files of docs/ only. So a link that leaves docs/ becomes text with the file's path,
and anchors are made as on GitHub. Links between pages stay relative links to ``.md`` files.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_CODE = re.compile(r"```.*?^ *```|`[^`\n]*\]\([^`\n]*`", re.DOTALL | re.MULTILINE)
_ROLE = re.compile(r":\w+:<code>(?:~[\w.]+\.)?([^<]*)</code>")
_CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
_LOADED = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed|object|link)\b[^>]*?"
    r"\b(?:src|href|data|srcset)=[\"']?((?:https?:)?//[^\"' >]+)"
    r"|(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)",
    re.IGNORECASE,
)
_POLICY = '<meta http-equiv="Content-Security-Policy"'
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Set the rule by which mkdocs makes anchors to GitHub's; mkdocs calls it first."""
    config["mdx_configs"].setdefault("toc", {})["slugify"] = github_anchor
    return config


def github_anchor(heading: str, separator: str = "-") -> str:
    """Return the anchor that GitHub gives to a heading."""
    # Not stripped: GitHub keeps a hyphen for the space before a removed last character.
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", separator)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to files outside docs/ by their text and the file's path."""
    return outside_links_as_text(markdown, posixpath.dirname(page.file.src_uri))


def on_page_content(html: str, **_: Any) -> str:
    """Write a bar in code in a table cell as a bar; the pages escape it, as GitHub needs it.

    A reference of a docstring, ``:class:`` before code, becomes its name.
    """
    html = _ROLE.sub(r"<code>\1</code>", html)
    return _CELL.sub(lambda cell: cell[0].replace("\\|", "|"), html)


def outside_links_as_text(markdown: str, folder: str) -> str:
    """Return Markdown in which links that leave docs/ are text.

    Links between pages, to anchors and to other servers stay.

    Args:
        markdown: text of the page.
        folder: folder of the page below docs/; empty for docs/ itself.

    Returns:
        The text, where ``[Dockerfile](../Dockerfile)`` is ``Dockerfile (`Dockerfile`)``. Code is
        not changed.
    """

    def replaced(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, link[2]))
        if path.startswith("docs/"):
            return link[0]
        return link[1] if path in link[1] else f"{link[1]} (`{path}`)"

    parts, at = [], 0
    for code in _CODE.finditer(markdown):
        parts += [_LINK.sub(replaced, markdown[at : code.start()]), code[0]]
        at = code.end()
    return "".join([*parts, _LINK.sub(replaced, markdown[at:])])


def on_post_build(config: Any) -> None:
    """Raise an error if a page would load something from another server; otherwise do nothing.

    mkdocs calls it when the site is built.

    Raises:
        PluginError: the pages, and what each would load.
    """
    # mkdocs is installed only where the site is built.
    from mkdocs.exceptions import PluginError  # type: ignore[import-not-found, unused-ignore]

    folder = Path(config["site_dir"])
    found = [
        f"{path.relative_to(folder)}: {what}"
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".html", ".css", ".svg")
        for what in loaded_from_elsewhere(path.suffix, path.read_text())
    ]
    if found:
        raise PluginError("the site must work offline; found:\n" + "\n".join(found))


def loaded_from_elsewhere(suffix: str, text: str) -> Iterator[str]:
    """Yield what a built file would load from another server.

    Args:
        suffix: ``.html``, ``.css`` or ``.svg``.
        text: the file's text.

    Yields:
        Each address; for a page also its lack of the policy by which browsers refuse the rest.
    """
    for match in _LOADED.finditer(text):
        yield match[1] or match[2]
    if suffix == ".html" and _POLICY not in text:
        yield "no Content-Security-Policy (docs/.theme/main.html)"
    if 'class="mermaid"' in text:
        yield "mermaid, which the theme loads from another server: draw an SVG file"
