"""A persister that writes nothing: it answers the lines of an agent, or of a script without one.

python persister.py echo         says what it was sent; ends with code 3 if the folder is "die"
python persister.py odd          says much that makes no sense, and then what is good
python persister.py done [GATES] each order is done, once GATES/ATTEMPT exists if it is given
python persister.py leave FILE   each order is done; makes FILE when its input has ended
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dlrover_py.protocol.agents import PersistPhase
from dlrover_py.protocol.persister import WriteReply, WriteRequest, read_line


def tell(document: Mapping[str, Any]) -> None:
    print(json.dumps({"kind": "reply", **document}), flush=True)


def echo(line: bytes) -> None:
    said = json.loads(line)
    if said["kind"] == "write" and said["dir"] == "die":
        sys.exit(3)
    print("not JSON", flush=True)
    why = f"{said['kind']} {said.get('dir', '')} {said.get('term', '')}".strip()
    tell({"attempt": said["attempt"], "phase": "writing", "why": why})


def odd(line: bytes) -> None:
    answer = {"attempt": json.loads(line)["attempt"], "phase": "done"}
    stored = {"step": 1, "round": 1, "timeline": 0, "where": "/c", "at": 1.5, "number": 1}
    wrong: list[object] = [[], {"step": 1}, "abcdef"]
    changes: list[dict[str, object]] = [
        {"where": 7},
        {"at": "x"},
        {"step": -1},
        {"step": 1 << 60},
        {"at": float("inf")},
    ]
    for one in [*wrong, *({**stored, **change} for change in changes)]:
        tell({**answer, "stored": one})
    print("x" * (3 << 20), flush=True)
    tell({**answer, "stored": stored})


def done(line: bytes) -> None:
    request = read_line(line)
    assert isinstance(request, WriteRequest)
    while (
        sys.argv[1] == "done" and sys.argv[2:] and not Path(sys.argv[2], request.attempt).exists()
    ):
        time.sleep(0.01)
    sys.stdout.buffer.write(WriteReply(attempt=request.attempt, phase=PersistPhase.DONE).encode())
    sys.stdout.flush()


WAYS: dict[str, Callable[[bytes], None]] = {"echo": echo, "odd": odd, "done": done, "leave": done}

if __name__ == "__main__":
    for line in sys.stdin.buffer:
        if line.strip() and json.loads(line)["kind"] != "watch":
            WAYS[sys.argv[1]](line)
    if sys.argv[1] == "leave":
        Path(sys.argv[2]).touch()
