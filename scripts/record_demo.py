"""Records ``make demo`` as the animated picture at the top of README.md.

    python scripts/record_demo.py                       writes docs/demo.svg
    python scripts/record_demo.py --from run.json       draws an existing recording
    python scripts/record_demo.py --save run.json       keeps the recording

The demo runs in its own terminal. The recording holds the time of each line of its output. Long
waits are shortened. The picture depends only on the recording.
"""

import argparse
import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
import time
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
COLUMNS, ROWS = 96, 26
CELL, LEADING, PAD, BAR = 7.83, 18, 18, 34
LONGEST_WAIT_S, SHORTEST_WAIT_S, HOLD_S = 1.3, 0.12, 7.0
_CODES = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07]*\x07|\x1b[=>()][0AB]?")
_LOG = re.compile(r'\{"at": |\d\d:\d\d:\d\d\.\d+ persister ')
_CLASSES = {"1": "b", "2": "d", "31": "r", "33": "y", "32": "g", "36": "c", "35": "m", "92": "g"}
_STYLE = """
text { font: 13px "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #d7dce5; white-space: pre; }
.b { font-weight: bold; fill: #fff; } .d { fill: #8b95a7; } .y { fill: #e0b050; }
.r { fill: #e57368; } .g { fill: #58b48c; } .c { fill: #6cb6d9; } .m { fill: #b48ead; }
"""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of output: its text with terminal codes, and its time in seconds."""

    at: float
    text: str


def record() -> list[Line]:
    """Run the demo in a terminal of its own until it ends, and return its output.

    A last line without a line break is dropped.

    Raises:
        SystemExit: the demo failed.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        command = ["make", "--no-print-directory", "demo"]
        os.execvp("env", ["env", "TERM=xterm-256color", *command])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    start, rest, lines = time.monotonic(), "", []
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the last process of the terminal has ended
            break
        if not data:
            break
        *whole, rest = (rest + data.decode("utf-8", "replace")).split("\n")
        at = round(time.monotonic() - start, 2)
        lines += [Line(at, text.rstrip("\r")) for text in whole]
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise SystemExit(f"make demo ended with {code}")
    return lines


def tidied(lines: list[Line]) -> list[Line]:
    """Return the lines without logs of programs, and with one name for all temporary folders."""
    return [
        Line(line.at, re.sub(r"/tmp/demo-\w+", "/tmp/demo", line.text))
        for line in lines
        if not _LOG.match(line.text)
    ]


def spans(text: str) -> list[tuple[str, str]]:
    """Return a line as parts, each with its CSS class, which is empty for plain text.

    Of several styles at the same place only one is kept. Other terminal codes are dropped.
    """
    found, style, at = [], "", 0
    for code in _CODES.finditer(text):
        if code.start() > at:
            found.append((text[at : code.start()], style))
        at = code.end()
        if code[2] == "m":
            numbers = [n for n in (code[1] or "0").split(";") if n]
            style = "" if "0" in numbers or not numbers else style
            style = next((_CLASSES[n] for n in numbers if n in _CLASSES), style)
    if text[at:]:
        found.append((text[at:], style))
    return found


def wrapped(lines: list[Line]) -> list[tuple[float, list[tuple[str, str]]]]:
    """Return the rows of a terminal. Longer lines continue in the next row."""
    found: list[tuple[float, list[tuple[str, str]]]] = []
    for line in lines:
        row: list[tuple[str, str]] = []
        free = COLUMNS
        for said, style in spans(line.text):
            while said:
                if not free:
                    found.append((line.at, row))
                    row, free = [], COLUMNS
                row.append((said[:free], style))
                said, free = said[free:], free - len(said[:free])
        found.append((line.at, row))
    return found


def moments(times: list[float]) -> list[float]:
    """Return the time at which each row appears.

    The times are those of the recording, but long waits are shortened and no two rows appear at the
    same time.
    """
    now, before, found = 0.5, None, []
    for at in times:
        if before is not None:
            now += min(LONGEST_WAIT_S, max(SHORTEST_WAIT_S, at - before))
        before = at
        found.append(round(now, 2))
    return found


def draw(lines: list[Line], title: str = "make demo") -> str:
    """Return the picture as SVG."""
    rows = wrapped(lines)
    shown = moments([at for at, _ in rows])
    total = (shown[-1] if shown else 0.0) + HOLD_S
    width, height = round(2 * PAD + COLUMNS * CELL), BAR + ROWS * LEADING + PAD
    styles, texts = [_STYLE], []

    def part(at: float) -> str:
        return f"{100 * at / total:.2f}%"

    for number, ((_, row), at) in enumerate(zip(rows, shown, strict=True)):
        words = "".join(
            f'<tspan class="{style}">{escape(said)}</tspan>' if style else escape(said)
            for said, style in row
        )
        if not words.strip():
            continue
        y = BAR + (number + 1) * LEADING - 4
        styles.append(
            f"@keyframes l{number}{{0%,{part(at)}{{opacity:0}}{part(at + 0.01)},100%{{opacity:1}}}}"
            f"#l{number}{{animation:l{number} {total:.2f}s infinite}}"
        )
        texts.append(f'<text id="l{number}" x="{PAD}" y="{y}" xml:space="preserve">{words}</text>')
    hidden = max(0, len(rows) - ROWS)
    if hidden:
        steps = ["0%{transform:none}"]
        for up in range(1, hidden + 1):
            at = shown[ROWS + up - 1]
            steps.append(f"{part(at)}{{transform:translateY({-up * LEADING}px)}}")
        last = f"translateY({-hidden * LEADING}px)"
        steps.append(f"100%{{transform:{last}}}")
        styles.append(
            f"@keyframes up{{{''.join(steps)}}}"
            f"#up{{transform:{last};animation:up {total:.2f}s infinite;"
            "animation-timing-function:step-end}"
        )
    styles.append("@media (prefers-reduced-motion: reduce){*{animation:none !important}}")
    dots = "".join(
        f'<circle cx="{PAD + 4 + 18 * i}" cy="17" r="5.5" fill="{colour}"/>'
        for i, colour in enumerate(("#e5685e", "#e0b050", "#58b48c"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{escape(title)}">\n'
        f"<style>{''.join(styles)}</style>\n"
        f'<rect width="{width}" height="{height}" rx="9" fill="#161b24"/>\n{dots}\n'
        f'<text x="{width / 2:g}" y="21" text-anchor="middle" class="d">{escape(title)}</text>\n'
        f'<svg x="0" y="{BAR}" width="{width}" height="{ROWS * LEADING + 6}" '
        f'viewBox="0 {BAR} {width} {ROWS * LEADING + 6}"><g id="up">\n'
        + "\n".join(texts)
        + "\n</g></svg>\n</svg>\n"
    )


def main() -> int:
    """Record the demo, or read a recording, and draw the picture; return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="source", type=Path, help="a recording that was kept")
    parser.add_argument("--save", type=Path, help="keep the recording there")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/demo.svg")
    args = parser.parse_args()
    if args.source is not None:
        lines = [Line(at, text) for at, text in json.loads(args.source.read_text())]
    else:
        lines = record()
    if args.save is not None:
        args.save.write_text(json.dumps([(line.at, line.text) for line in lines]))
    args.out.write_text(draw(tidied(lines), "make demo (waits are cut short)"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
