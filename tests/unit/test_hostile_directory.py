"""A checkpoint directory in which another user writes: manifests, claims and files made to harm."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import xxhash
from click.testing import CliRunner

from dlrover_py.checkpoint.directory import (
    LEASE_FILE,
    LEASE_S,
    CheckpointDirectory,
    DirectoryClaimedError,
    DirectoryOwner,
)
from dlrover_py.cli.checkpoints import ckpt
from dlrover_py.protocol.errors import CheckpointError
from dlrover_py.protocol.manifest import Manifest, WrittenChunk, WrittenObject
from dlrover_py.protocol.slots import TensorChunk

ATTEMPT = "a" * 12
FOLDER = f"step-5.{ATTEMPT}"
SPARSE = 1 << 40


def manifest(**fields: Any) -> Manifest:
    whole: dict[str, Any] = {
        "step": 5,
        "attempt": ATTEMPT,
        "job": "job",
        "round": 1,
        "timeline": 0,
        "world": 1,
        "folder": FOLDER,
        "at": 1.0,
        "chunks": (shard((4,)),),
    }
    return Manifest(**whole | fields)


def shard(shape: tuple[int, ...], key: str = "w", file: str = "__0_0.distcp") -> WrittenChunk:
    return WrittenChunk(TensorChunk(key, "uint8", shape, shape, (0,) * len(shape)), file, 0, 123)


def sealed(found: Manifest, **values: Any) -> bytes:
    """A manifest's document, with other values under a digest that is right."""
    body = json.loads(found.encode().split(b'"manifest": ', 1)[1].rstrip()[:-1])
    text = json.dumps(body | values).encode()
    return b'{"xxh3": "%016x", "manifest": %s}\n' % (xxhash.xxh3_64_intdigest(text), text)


def written(folder: Path, document: bytes) -> Path:
    (folder / FOLDER).mkdir()
    (folder / FOLDER / "__0_0.distcp").write_bytes(b"abcd" * 10)
    (folder / FOLDER / ".metadata").write_bytes(b"")
    (folder / f"{FOLDER}.json").write_bytes(document)
    return folder


HUGE = 10**400


@pytest.mark.parametrize(
    "document",
    [
        *(
            sealed(manifest(chunks=(shard((4,), file=name),)))
            for name in ("../x", "/etc/x", "a\0b")
        ),
        *(
            sealed(manifest(chunks=(shard((4,), file=name),)))
            for name in ("\ud800", "..", "", "x" * 256)
        ),
        *(
            sealed(manifest(), **{name: HUGE})
            for name in ("at", "metric", "number", "step", "world")
        ),
        sealed(manifest(), at=float("nan")),
        sealed(manifest(), number=-5),
        sealed(
            manifest(chunks=(WrittenChunk(TensorChunk("w", "uint8", (4,), (2,), (9,)), "f", 0, 1),))
        ),
        sealed(
            manifest(
                chunks=(WrittenChunk(TensorChunk("w", "uint8", (4,), (2, 2), (0,)), "f", 0, 1),)
            )
        ),
        sealed(
            manifest(
                chunks=(
                    WrittenChunk(TensorChunk("w", "uint8", (0,), (1 << 61, 8), (0,)), "f", 0, 1),
                )
            )
        ),
    ],
)
def test_a_manifest_that_none_of_ours_wrote_is_refused(document: bytes) -> None:
    """It is in words, and a ValueError: each reader of manifests expects that, and no other."""
    with pytest.raises(ValueError, match=r"^(it |its |found )|a box of it"):
        Manifest.decode(document)


@pytest.mark.parametrize("words", [["ls"], ["show"], ["verify"], ["rm", "--keep", "1", "--yes"]])
@pytest.mark.parametrize("bad", ["\x1b[2J\x1b]0;x\x07", "\x9b2J", "\ud800", "\u202e\u2066", "a\rb"])
def test_what_a_manifest_says_is_only_shown(tmp_path: Path, bad: str, words: list[str]) -> None:
    """It was written to the terminal as it is; half of a surrogate pair ended with a traceback."""
    hostile = manifest(job=bad, notes=(bad,), chunks=(shard((4,), key=f"k{bad}"),))
    folder = written(tmp_path, sealed(hostile))
    (folder / "step-6.b.json").write_bytes(sealed(manifest(), format=bad))
    result = CliRunner().invoke(ckpt, [words[0], str(folder), *words[1:]])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert not set(result.output) & set("\x1b\x07\x9b\r\ud800\u202e\u2066")
    assert result.output


@pytest.mark.parametrize(
    "hostile",
    [
        manifest(chunks=(shard((1 << 61,)),)),
        manifest(objects=(WrittenObject("o", "__0_0.distcp", 0, 1 << 61, 1),)),
    ],
)
@pytest.mark.parametrize("command", ["verify", "export"])
def test_memory_is_not_taken_because_a_manifest_says_so(
    tmp_path: Path, hostile: Manifest, command: str
) -> None:
    folder = written(tmp_path, sealed(hostile))
    out = [str(tmp_path / "out")] if command == "export" else []
    result = CliRunner().invoke(ckpt, [command, str(folder), *out])
    if result.exception is not None:
        assert isinstance(result.exception, SystemExit | CheckpointError)


def test_an_object_is_read_as_far_as_it_is_there(tmp_path: Path) -> None:
    """A script reads objects so when it restores."""
    store = CheckpointDirectory(written(tmp_path, manifest().encode()))
    found = store.checkpoints()[0]
    assert store.read_all(found, "__0_0.distcp", 0, 8) == b"abcdabcd"
    with pytest.raises(OSError, match="ends at byte 40"):
        store.read_all(found, "__0_0.distcp", 0, 1 << 61)


def test_a_sparse_document_is_not_read(tmp_path: Path) -> None:
    """It costs nothing to make one of a terabyte, and it ended all readers with MemoryError."""
    folder = written(tmp_path, manifest().encode())
    with (folder / f"step-6.{ATTEMPT}.json").open("wb") as file:
        file.truncate(SPARSE)
    store = CheckpointDirectory(folder)
    assert [m.step for m in store.checkpoints()] == [5]
    assert f"it has {SPARSE} bytes" in store.damaged[f"step-6.{ATTEMPT}.json"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root may open it")
def test_a_link_to_what_is_never_there_is_not_waited_for(tmp_path: Path) -> None:
    """/proc/kmsg is a regular file, of which a read waits for ever."""
    folder = written(tmp_path, manifest().encode())
    (folder / f"step-6.{ATTEMPT}.json").symlink_to("/proc/kmsg")
    assert [m.step for m in CheckpointDirectory(folder).checkpoints()] == [5]


@pytest.mark.parametrize("name", ["\x1b[2J", "\ud800", "x" * 2000, "sparse"])
def test_a_claim_that_none_of_ours_wrote_lapses_and_is_not_shown(tmp_path: Path, name: str) -> None:
    if name == "sparse":
        with (tmp_path / LEASE_FILE).open("wb") as file:
            file.truncate(SPARSE)
    else:
        claim = {"job": "other", "name": name, "shared": True, "writer": "w"}
        (tmp_path / LEASE_FILE).write_text(json.dumps(claim))
    now = [100.0]
    store = CheckpointDirectory(tmp_path, clock=lambda: now[0])
    with pytest.raises(DirectoryClaimedError, match="which cannot be read"):
        store.acquire_lease(DirectoryOwner("job"), ATTEMPT)
    now[0] += LEASE_S + 1
    store.acquire_lease(DirectoryOwner("job"), ATTEMPT)
    assert store.renew_lease()
