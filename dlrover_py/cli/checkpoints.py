"""``dlrover ckpt …``: list, check, export and remove checkpoints in storage.

Only tensors that are split into shards, and the torch format, need torch. For everything else the
manifest says where the raw bytes are.
"""

import contextlib
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import xxhash

from dlrover_py.checkpoint.directory import CheckpointDirectory, FolderBackend, retained
from dlrover_py.checkpoint.directory import log as directory_log
from dlrover_py.cli import view
from dlrover_py.cli.numbers import Real
from dlrover_py.protocol.errors import CheckpointError, ConfigError
from dlrover_py.protocol.manifest import Manifest, WrittenChunk, WrittenObject
from dlrover_py.protocol.persister import KeepRules
from dlrover_py.protocol.status import date_time
from dlrover_py.protocol.words import byte_size, counted

if TYPE_CHECKING:
    import torch

SHARD_GB = 5.0
"""Size of a safetensors file of an export in several files, in 10⁹ bytes."""
READ_BYTES = 1 << 24
"""Bytes that are read and hashed at a time."""
SAFETENSORS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32",
    "int32": "I32", "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16",
    "float32": "F32", "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0", "complex64": "C64",
}  # fmt: skip
"""Names of torch's types in the safetensors format (safetensors/tensor.rs)."""
_NO_LOG = logging.NullHandler()
"""A handler for the log of the store. Without one, Python prints its warnings on standard error,
where these commands name damaged manifests themselves.
"""


@click.group()
def ckpt() -> None:
    """List, check, export and remove the checkpoints of a directory or bucket.

    DIR is a path or an address such as s3://bucket/folder. WHICH is a step, or the name of a
    checkpoint's folder.
    """


directory = click.argument("directory", metavar="DIR")
which_argument = click.argument("which", required=False)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
yes = click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")


def _echo(text: str, *, err: bool = False) -> None:
    """Print text that may come from a manifest or a listing, with control characters escaped."""
    click.echo(view.plain(text), err=err)


# --- Choice of a checkpoint ---


@contextlib.contextmanager
def _as_checkpoint_errors() -> Iterator[None]:
    """Turn each OSError in the block into a CheckpointError of one line with the file's name."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise CheckpointError(f"{where}{error.strerror or error}") from error


def _open_directory(directory: str) -> tuple[CheckpointDirectory, list[Manifest]]:
    """Return the store and the manifests of its intact checkpoints, newest first.

    The list is empty if the folder exists without checkpoints, and for an empty bucket. Each
    damaged manifest is left out of the list and reported on standard error.

    Raises:
        ConfigError: the address is not valid, or there is no such folder.
        CheckpointError: the store does not answer, or its manifests cannot be read.
    """
    directory_log.addHandler(_NO_LOG)
    store = CheckpointDirectory(directory)
    if isinstance(store.place, FolderBackend) and store.place.path.is_file():
        raise ConfigError(f"{store.place.path}: this is a file; expected a folder of checkpoints")
    with _as_checkpoint_errors():
        found = store.checkpoints()
        if not found and isinstance(store.place, FolderBackend) and not store.place.path.exists():
            raise ConfigError(f"{store.place.url}: there is no such folder")
    for name in store.damaged:
        _echo(f"dlrover: {store.fault(name)}", err=True)
    return store, found


def _selected(directory: str, which: str | None) -> tuple[CheckpointDirectory, Manifest]:
    """Return the checkpoint with this name or step, or the newest if none is given.

    Damaged manifests are never selected; they are reported on standard error.

    Raises:
        ConfigError: there is no such checkpoint, or no such folder.
        CheckpointError: the store does not answer, or its manifests cannot be read.
    """
    store, found = _open_directory(directory)
    if not found:
        raise ConfigError(_no_checkpoint_message(store))
    if which is None:
        return store, found[0]
    return store, _find(store, found, which)


def _no_checkpoint_message(store: CheckpointDirectory) -> str:
    """Return the message about a directory without checkpoints.

    It differs if the directory is itself a checkpoint.
    """
    if wrong := store.single_checkpoint_error():
        return f"{wrong}: name the folder above it, or read it with torch.distributed.checkpoint"
    return f"{store.place.url}: there is no checkpoint"


def _find(store: CheckpointDirectory, found: Sequence[Manifest], which: str) -> Manifest:
    """Return the newest checkpoint with this step or folder; raise ConfigError if there is none."""
    for manifest in found:  # newest first: of two with the same step the newer one is found
        if which in (str(manifest.step), manifest.folder):
            return manifest
    steps = ", ".join(str(m.step) for m in found[:8]) + (" …" if len(found) > 8 else "")
    raise ConfigError(f"{store.place.url}: no checkpoint {which!r}; existing steps: {steps}")


# --- Commands ls and show ---


@ckpt.command("ls")
@directory
@as_json
def list_checkpoints(directory: str, as_json: bool) -> None:
    """List all checkpoints, the newest commit first.

    CERTIFIED says that all replicas had equal parameters at that step (compareEvery).

    Checkpoints with a damaged manifest are not in the list. Standard error names them.
    """
    store, found = _open_directory(directory)
    if as_json:
        click.echo(json.dumps([_row(store, m) for m in found]))
        return
    if not found:
        _echo(_no_checkpoint_message(store))
        return
    table = _table("STEP", "AGE", "SIZE", "WORLD", "METRIC", "CERTIFIED", "JOB", "FOLDER")
    for m in found:
        metric = "" if m.metric is None else f"{m.metric:g}"
        size = byte_size(m.nbytes)
        job = view.plain(m.job)
        age, certified = view.age(m.at), "yes" if m.certified else ""
        table.add_row(str(m.step), age, size, str(m.world), metric, certified, job, m.folder)
    _print(table)


def _row(store: CheckpointDirectory, manifest: Manifest) -> dict[str, Any]:
    """Return the fields of a checkpoint for ``--json``."""
    return {
        "step": manifest.step,
        "where": store.where(manifest),
        "at": date_time(manifest.at),
        "number": manifest.number,
        "nbytes": manifest.nbytes,
        "tensors": len({w.chunk.key for w in manifest.chunks}),
        "world": manifest.world,
        "metric": manifest.metric,
        "certified": manifest.certified,
        "job": manifest.job,
        "term": manifest.term,
        "round": manifest.round,
        "notes": list(manifest.notes),
    }


@ckpt.command()
@directory
@which_argument
@as_json
def show(directory: str, which: str | None, as_json: bool) -> None:
    """Show what a checkpoint contains.

    WHICH selects the checkpoint. The default is the newest one. Only the manifest is read; `verify`
    checks the data.

    \f

    Args:
        directory: path or address of the folder with the checkpoints.
        which: step, or name of a checkpoint's folder; None for the newest checkpoint.
        as_json: print JSON instead of text.
    """
    store, manifest = _selected(directory, which)
    tensors = _by_key(manifest.chunks)
    if as_json:
        rows = [
            {
                "key": key,
                "dtype": shards[0].chunk.dtype,
                "shape": shards[0].chunk.whole,
                "nbytes": sum(w.chunk.nbytes for w in shards),
                "files": sorted({w.file for w in shards}),
                "shards": len(shards),
            }
            for key, shards in tensors.items()
        ]
        objects = [{"key": o.key, "nbytes": o.nbytes, "file": o.file} for o in manifest.objects]
        document = _row(store, manifest) | {"tensors": rows, "objects": objects}
        click.echo(json.dumps(document))
        return
    age = view.age(manifest.at)
    _echo(f"{store.where(manifest)}: step {manifest.step}, {age} ago, of {manifest.job}")
    metric = "" if manifest.metric is None else f", metric {manifest.metric:g}"
    _echo(
        f"{byte_size(manifest.nbytes)} in {counted(len(manifest.files), 'file')}, "
        f"by {counted(manifest.world, 'worker')}{metric}"
    )
    for note in manifest.notes:
        _echo(f"note: {note}")
    table = _table("KEY", "TYPE", "SHAPE", "SIZE", "SHARDS")
    for key, shards in tensors.items():
        chunk = shards[0].chunk
        shape = "×".join(map(str, chunk.whole)) or "scalar"
        size = byte_size(sum(w.chunk.nbytes for w in shards))
        table.add_row(view.plain(key), chunk.dtype, shape, size, str(len(shards)))
    for item in manifest.objects:
        table.add_row(view.plain(item.key), "object", "", byte_size(item.nbytes), "")
    _print(table)


def _by_key(chunks: Sequence[WrittenChunk]) -> dict[str, list[WrittenChunk]]:
    """Return the stored shards of each tensor by its key, in the order of the manifest."""
    found: dict[str, list[WrittenChunk]] = {}
    for written in chunks:
        found.setdefault(written.chunk.key, []).append(written)
    return found


def _table(*heads: str) -> Any:
    """Return an empty table with these column heads."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        right = head in ("STEP", "SIZE", "WORLD", "METRIC", "SHARDS")
        table.add_column(head, justify="right" if right else "left", no_wrap=True)
    return table


def _print(table: Any) -> None:
    """Print a table."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 200  # a file or pipe has no width
    Console(highlight=False, width=width, markup=False).print(table)


# --- Reading ---


def _check(
    store: CheckpointDirectory, manifest: Manifest, at: WrittenChunk | WrittenObject
) -> None:
    """Read the shard of a tensor, or an object, and compare its digest.

    Nothing is returned. At most ``READ_BYTES`` bytes are in memory at a time.

    Raises:
        CheckpointError: the bytes differ from those that were written, or are missing.
    """
    sums = xxhash.xxh3_64()
    buffer = memoryview(bytearray(min(READ_BYTES, at.nbytes)))
    with _as_checkpoint_errors():
        for start in range(0, at.nbytes, READ_BYTES):
            part = buffer[: at.nbytes - start]
            store.read_into(manifest, at.file, at.position + start, part)
            sums.update(part)
    _compare(store, manifest, at, sums.intdigest())


def _read(
    store: CheckpointDirectory, manifest: Manifest, at: WrittenChunk | WrittenObject
) -> bytearray:
    """Read the shard of a tensor, or an object, compare its digest, and return its bytes.

    Args:
        store: directory of the checkpoints.
        manifest: manifest of the checkpoint.
        at: the shard or object.

    Raises:
        CheckpointError: the bytes differ from those that were written, or are missing.
    """
    with _as_checkpoint_errors():
        data = store.read_all(manifest, at.file, at.position, at.nbytes)
    _compare(store, manifest, at, xxhash.xxh3_64_intdigest(data))
    return data


def _compare(
    store: CheckpointDirectory, manifest: Manifest, at: WrittenChunk | WrittenObject, found: int
) -> None:
    """Compare a digest with the one in the manifest.

    Args:
        store: directory of the checkpoints, for the message.
        manifest: manifest of the checkpoint.
        at: the shard or object.
        found: digest of the bytes that were read.

    Raises:
        CheckpointError: the digests differ.
    """
    if found != at.xxh3:
        key = at.chunk.key if isinstance(at, WrittenChunk) else at.key
        raise CheckpointError(
            f"{store.where(manifest)}/{at.file}: {key}: its {at.nbytes} bytes at offset "
            f"{at.position} differ from those that were written"
        )


@contextlib.contextmanager
def _progress(text: str, total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error, and yield the function that advances it by some bytes.

    No bar is shown with ``quiet``, or if standard error is no terminal; the function then does
    nothing. The bar disappears at the end.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


# --- Command verify ---


@ckpt.command()
@directory
@which_argument
@as_json
def verify(directory: str, which: str | None, as_json: bool) -> int:
    """Read every byte and compare it with the stored digests.

    The digests were computed when the checkpoint was staged. All checkpoints are read, unless WHICH
    names one. The exit code is 1 if anything is damaged. Nothing is repaired or removed.

    \f

    Args:
        directory: path or address of the folder with the checkpoints.
        which: step, or name of a checkpoint's folder; None for all checkpoints.
        as_json: print JSON instead of text and progress.

    Raises:
        ConfigError: the folder does not exist or has no checkpoints, or none is ``which``.
        CheckpointError: the folder cannot be listed.
    """
    store, found = _open_directory(directory)
    if which is not None:
        found = [_find(store, found, which)]
    elif not found and not store.damaged:
        raise ConfigError(f"{store.place.url}: there is no checkpoint")
    bad: dict[str, list[str]] = {name: [why] for name, why in store.damaged.items()}
    if which is not None:
        bad = {}
    for manifest in found:
        wrong = _damage(store, manifest, quiet=as_json)
        if wrong:
            bad[manifest.folder] = wrong
        if as_json:
            continue
        where = store.where(manifest)
        if not wrong:
            parts = len(manifest.chunks) + len(manifest.objects)
            _echo(f"{where}: intact: {byte_size(manifest.nbytes)} in {parts} parts")
        for text in wrong:
            _echo(f"{where}: DAMAGED: {text}")
    if as_json:
        intact = [m.folder for m in found if m.folder not in bad]
        click.echo(json.dumps({"intact": intact, "damaged": bad}))
    return 1 if bad else 0


def _damage(store: CheckpointDirectory, manifest: Manifest, *, quiet: bool) -> list[str]:
    """Read a checkpoint; return a message for each damaged part, or [] if it is intact.

    The digest of a file was computed while its staged tensors were written. A file whose digest
    matches therefore holds undamaged tensors. Only in the other files are tensors checked one by
    one, to name the damaged ones. The index for torch (``.metadata``) must be readable, too, and
    match its digest if the manifest has one. Tables of a parameter server have no such index.
    """
    wrong: list[str] = []
    intact: set[str] = set()
    framing_damaged: list[str] = []
    total = sum(size for size, _ in manifest.sums) or manifest.nbytes
    with _progress(f"step {manifest.step}", total, quiet=quiet) as advance:
        if manifest.sums:
            for name, (size, xxh3) in zip(manifest.files, manifest.sums, strict=True):
                if _file_is_intact(store, manifest, name, size, xxh3, advance):
                    intact.add(name)
                else:
                    framing_damaged.append(name)
        parts: list[WrittenChunk | WrittenObject] = [*manifest.chunks, *manifest.objects]
        for at in parts:
            if at.file in intact:
                continue
            try:
                _check(store, manifest, at)
            except CheckpointError as error:
                wrong.append(str(error).removeprefix(f"{store.where(manifest)}/"))
                framing_damaged = [name for name in framing_damaged if name != at.file]
            if not manifest.sums:
                advance(at.nbytes)
        wrong += [
            f"{name}: the bytes around its tensors differ from those that were written: load() "
            "still reads the tensors, but torch.distributed.checkpoint may fail"
            for name in framing_damaged
        ]
        if manifest.has_tables:
            return wrong
        try:
            with _as_checkpoint_errors():
                index = store.place.read(f"{manifest.folder}/.metadata")
            if manifest.index and xxhash.xxh3_64_intdigest(index) != manifest.index:
                raise CheckpointError(".metadata: the bytes differ from those that were written")
        except CheckpointError as error:
            wrong.append(f"torch cannot load it: {error}")
    return wrong


def _file_is_intact(
    store: CheckpointDirectory,
    manifest: Manifest,
    name: str,
    size: int,
    xxh3: int,
    advance: Callable[[int], None],
) -> bool:
    """Read a file up to its expected size, and return whether its digest is as expected.

    A file that is too short or cannot be read gives False, not an error. Bytes after the expected
    size are not read.

    Args:
        store: directory of the checkpoints.
        manifest: manifest of the checkpoint.
        name: name of the file.
        size: expected size of the file in bytes.
        xxh3: expected digest of the file.
        advance: called after each part with the number of its bytes.
    """
    sums = xxhash.xxh3_64()
    buffer = memoryview(bytearray(min(READ_BYTES, size)))
    for start in range(0, size, READ_BYTES):
        part = buffer[: size - start]
        try:
            store.read_into(manifest, name, start, part)
        except OSError:  # its tensors are read one by one later, which shows why
            return False
        sums.update(part)
        advance(len(part))
    return sums.intdigest() == xxh3


# --- Command export ---


@ckpt.command()
@directory
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--which", help="Step, or name of the folder. Default: the newest checkpoint.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["safetensors", "torch"]),
    default="safetensors",
    show_default=True,
    help="torch writes one file for torch.load(weights_only=True), with the objects.",
)
@click.option(
    "--keys",
    default="",
    metavar="PREFIX",
    help="Export only keys with this prefix, and remove it; model. suits load_state_dict().",
)
@click.option(
    "--shard-gb",
    type=Real(min=0, min_open=True),
    show_default=f"{SHARD_GB:g}",
    help="Largest size of a safetensors file in GB; a larger export gets several files.",
)
def export(
    directory: str, out: Path, which: str | None, form: str, keys: str, shard_gb: float | None
) -> None:
    """Write the tensors of a checkpoint to OUT, which must not exist.

    Safetensors: OUT is one file if its name ends with .safetensors. Otherwise OUT is a folder with
    model.safetensors, or with several shards and model.safetensors.index.json. Objects (values that
    are not tensors) are left out; --format torch exports them. Values that belong to one rank alone
    are left out, unless --keys names them. OUT appears only when it is complete.

    \f

    Args:
        directory: path or address of the folder with the checkpoints.
        out: path of the file or folder to write.
        which: step, or name of a checkpoint's folder; None for the newest checkpoint.
        form: ``safetensors`` or ``torch``.
        keys: prefix of the keys to write, which is removed from them; empty for all keys.
        shard_gb: size of a safetensors file in a folder, in 10⁹ bytes; None for the default. Only
            a file with a single tensor may be larger.

    Raises:
        ConfigError: there is no such checkpoint, ``out`` exists, ``keys`` is no prefix or is a
            whole key, ``shard_gb`` is given for a single file, safetensors has no name for the type
            of a tensor, or torch is needed and is not installed.
        CheckpointError: the checkpoint cannot be read or is damaged, or ``out`` cannot be written.
    """
    single = form == "torch" or out.suffix == ".safetensors"
    if single and shard_gb is not None:
        raise ConfigError(
            f"--shard-gb splits safetensors in a folder, but {out} is one file: leave it out, "
            "or name a folder"
        )
    store, manifest = _selected(directory, which)
    with _as_checkpoint_errors():
        there = out.exists()
    if there:
        raise ConfigError(f"{out} exists already: choose another path, or remove it")
    chosen = [w for w in manifest.chunks if w.chunk.key.startswith(keys)]
    objects = [o for o in manifest.objects if o.key.startswith(keys)]
    if not keys.startswith("rank/"):
        chosen = [w for w in chosen if not w.chunk.private]
        objects = [o for o in objects if not o.private]
    if not chosen:
        tops = sorted(
            {w.chunk.key.split(".", 1)[0] for w in manifest.chunks if not w.chunk.private}
        )
        raise ConfigError(
            f"no tensor's key begins with {keys!r}; the keys begin with {', '.join(tops)}"
        )
    if keys in (*(w.chunk.key for w in chosen), *(o.key for o in objects)):
        raise ConfigError(
            f"--keys {keys!r} is a complete key, so no name would be left: use a shorter prefix"
        )
    tensors = {key.removeprefix(keys): shards for key, shards in _by_key(chosen).items()}
    total = sum(w.chunk.nbytes for w in chosen)
    if form == "torch":
        _check_torch("--format torch")
    elif split := next((key for key, shards in tensors.items() if _is_split(shards)), ""):
        _check_torch(f"{split} is stored in shards: its export")
    reader = _TensorReader(store, manifest)
    with (
        _progress(f"step {manifest.step}", total, quiet=False) as advance,
        _temporary_path(out) as part,
    ):
        if form == "torch":
            _export_torch(part, tensors, objects, keys, reader, advance)
        else:
            limit = None if single else int((shard_gb or SHARD_GB) * 1e9)
            _export_safetensors(part, tensors, reader, advance, limit)
    for path in sorted(out.iterdir()) if out.is_dir() else [out]:
        _echo(f"{path}: {byte_size(path.stat().st_size)}")


def _is_split(shards: Sequence[WrittenChunk]) -> bool:
    """Return whether a tensor is stored in parts."""
    return len(shards) > 1 or shards[0].chunk.shape != shards[0].chunk.whole


def _check_torch(what: str) -> None:
    """Check that torch can be imported.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what} needs torch, which is not installed: install DLRover-Py with its extra torch"
        ) from error


class _TensorReader:
    """A reader of whole tensors that checks the digest of each shard."""

    def __init__(self, store: CheckpointDirectory, manifest: Manifest) -> None:
        self.store, self.manifest = store, manifest

    def raw(self, shards: Sequence[WrittenChunk]) -> memoryview:
        """Return all bytes of a tensor, contiguous. torch is needed if it is stored in parts.

        Raises:
            CheckpointError: shards are missing or damaged, or memory is short.
        """
        if not _is_split(shards):
            return memoryview(_read(self.store, self.manifest, shards[0]))
        return memoryview(self._assembled(shards))

    def tensor(self, shards: Sequence[WrittenChunk]) -> "torch.Tensor":
        """Return a torch tensor, assembled from its shards; an empty one if it has no elements.

        Raises:
            CheckpointError: shards are missing or damaged, or memory is short.
        """
        import torch

        first, data = shards[0].chunk, self._assembled(shards)
        dtype = getattr(torch, first.dtype)
        if not data:
            return torch.empty(first.whole, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).reshape(first.whole)

    def _assembled(self, shards: Sequence[WrittenChunk]) -> bytearray:
        """Return the bytes of a tensor, assembled from its shards; empty if it has no elements.

        torch must be installed.

        Raises:
            CheckpointError: shards are missing or damaged, or there is no memory for the tensor.
        """
        import torch

        first = shards[0].chunk
        if sum(prod(w.chunk.shape) for w in shards) != prod(first.whole):
            where = self.store.where(self.manifest)
            raise CheckpointError(f"{where}: {first.key}: its shards do not cover the tensor")
        try:
            data = bytearray(first._replace(shape=first.whole).nbytes)
        except (MemoryError, OverflowError) as error:
            text = f"{first.key}: not enough memory for {prod(first.whole)} numbers"
            raise CheckpointError(text) from error
        if not data:
            return data
        tensor = torch.frombuffer(data, dtype=getattr(torch, first.dtype)).reshape(first.whole)
        for written in shards:
            chunk = written.chunk
            part_data = _read(self.store, self.manifest, written)
            if not chunk.nbytes:
                continue
            values = torch.frombuffer(part_data, dtype=tensor.dtype, count=prod(chunk.shape))
            part = tensor
            for axis, (start, length) in enumerate(zip(chunk.at, chunk.shape, strict=True)):
                part = part.narrow(axis, start, length)
            part.copy_(values.reshape(chunk.shape))
        return data


def _export_torch(
    out: Path,
    tensors: dict[str, list[WrittenChunk]],
    objects: Sequence[WrittenObject],
    keys: str,
    reader: _TensorReader,
    advance: Callable[[int], None],
) -> None:
    """Write tensors and objects into one new file for ``torch.load``, without the prefix ``keys``.

    All of them are in memory at the same time.

    Args:
        out: path of the new file.
        tensors: shards of each tensor, by key without the prefix.
        objects: objects to write, with their whole keys.
        keys: prefix that is removed from the keys of the objects.
        reader: reader of the tensors.
        advance: called with the number of bytes of each tensor.

    Raises:
        CheckpointError: a tensor or object cannot be read or is damaged.
        OSError: the file exists or cannot be written.
    """
    import io

    import torch

    state: dict[str, Any] = {}
    for key, shards in tensors.items():
        state[key] = reader.tensor(shards)
        advance(sum(w.chunk.nbytes for w in shards))
    for item in objects:
        data = _read(reader.store, reader.manifest, item)
        state[item.key.removeprefix(keys)] = torch.load(io.BytesIO(data), weights_only=True)
    with out.open("xb") as file:  # "x": a link that another user has put there is not followed
        torch.save(state, file)


@contextlib.contextmanager
def _temporary_path(out: Path) -> Iterator[Path]:
    """Yield a temporary path beside OUT. It is renamed to OUT on success, and removed on failure.

    The folders above OUT are made, and stay after a failure. What is left at the temporary path by
    an earlier command is removed first. A file that has appeared at OUT meanwhile is replaced.

    Raises:
        CheckpointError: OUT cannot be written, or the block raises an OSError.
    """
    part = out.with_name(f".{out.name}.part")
    with _as_checkpoint_errors():
        out.parent.mkdir(parents=True, exist_ok=True)
        _clear(part)  # left by a command that was killed
        try:
            yield part
            part.rename(out)
        finally:
            _clear(part)


def _clear(path: Path) -> None:
    """Remove a file or a folder, if it exists. Errors of removing a folder are ignored."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _export_safetensors(
    out: Path,
    tensors: dict[str, list[WrittenChunk]],
    reader: _TensorReader,
    advance: Callable[[int], None],
    limit: int | None,
) -> None:
    """Write one safetensors file, or a folder if there is a limit on the size of a file.

    A tensor above the limit gets a file of its own, and no tensor is split. The folder gets an
    index only if it has several files. The format is
    https://github.com/huggingface/safetensors#format.

    Args:
        out: path of the new file or folder.
        tensors: shards of each tensor, by its key in the export.
        reader: reader of the tensors.
        advance: called with the number of bytes of each tensor.
        limit: largest size of a file's tensors in bytes; None to write one file.

    Raises:
        ConfigError: a tensor has a type that safetensors does not support. Nothing is written then.
        CheckpointError: a tensor cannot be read or is damaged.
        OSError: a file cannot be written.
    """
    sizes = {}
    for key, shards in tensors.items():
        chunk = shards[0].chunk
        if chunk.dtype not in SAFETENSORS:
            raise ConfigError(
                f"{key} is {chunk.dtype}, which safetensors does not support: use --format torch"
            )
        sizes[key] = chunk._replace(shape=chunk.whole).nbytes
    bins: list[list[str]] = [[]]
    filled = 0
    for key, size in sizes.items():
        if limit is not None and bins[-1] and filled + size > limit:
            bins.append([])
            filled = 0
        bins[-1].append(key)
        filled += size
    if limit is not None:
        out.mkdir()
    index: dict[str, str] = {}
    for number, names in enumerate(bins, 1):
        if limit is None:
            path = out
        elif len(bins) == 1:
            path = out / "model.safetensors"
        else:
            path = out / f"model-{number:05}-of-{len(bins):05}.safetensors"
        head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for key in names:
            chunk = tensors[key][0].chunk
            head[key] = {
                "dtype": SAFETENSORS[chunk.dtype],
                "shape": chunk.whole,
                "data_offsets": [end, end + sizes[key]],
            }
            end += sizes[key]
            index[key] = path.name
        text = json.dumps(head, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with path.open("xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for key in names:
                file.write(reader.raw(tensors[key]))
                advance(sizes[key])
    if len(bins) > 1:
        document = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
        (out / "model.safetensors.index.json").write_text(json.dumps(document, indent=2))


# --- Command rm ---


@ckpt.command()
@directory
@click.argument("which", nargs=-1)
@click.option(
    "--keep",
    "newest",
    type=click.IntRange(min=1),
    metavar="N",
    help="Keep the newest N checkpoints.",
)
@click.option(
    "--every",
    type=click.IntRange(min=1),
    metavar="K",
    help="Keep those whose step is a multiple of K.",
)
@click.option(
    "--best",
    type=click.IntRange(min=1),
    metavar="B",
    help="Keep the B with the lowest metric.",
)
@click.option("--highest", is_flag=True, help="With --best: keep the highest metrics.")
@click.option("--newest-too", is_flag=True, help="Remove even the newest, if WHICH names it.")
@yes
def rm(
    directory: str,
    which: tuple[str, ...],
    newest: int | None,
    every: int | None,
    best: int | None,
    highest: bool,
    newest_too: bool,
    yes: bool,
) -> None:
    """Remove checkpoints.

    These are the ones that WHICH names, or all that --keep, --every and --best do not keep. The
    newest checkpoint stays, unless WHICH names it and --newest-too is given. If no checkpoint is
    left to remove, the command says so and succeeds. The manifest of a checkpoint is removed first,
    so that an incomplete checkpoint is never listed. WHICH names a checkpoint with a damaged
    manifest by its folder. Rules never remove such a checkpoint.

    \f

    Args:
        directory: path or address of the folder with the checkpoints.
        which: steps, or names of folders of checkpoints; empty if rules choose.
        newest: number of newest checkpoints that stay. None is 1 if there is another rule.
        every: checkpoints whose step is a multiple of this number stay; None for no such rule.
        best: number of checkpoints with the best metric that stay; None for no such rule.
        highest: the highest metric is the best, not the lowest.
        newest_too: remove the newest checkpoint if ``which`` names it.
        yes: do not ask for confirmation.

    Raises:
        ConfigError: both or neither of ``which`` and rules are given, ``highest`` is given without
            ``best`` or ``newest_too`` without ``which``, a checkpoint does not exist or has a newer
            format, the newest one is named without ``newest_too``, or there is no terminal for the
            question.
        CheckpointError: the folder cannot be listed or changed.
        Abort: the user does not confirm (click.Abort).
    """
    rules = newest is not None or every is not None or best is not None
    if bool(which) == rules:
        raise ConfigError(
            "expected either WHICH to remove, or rules: --keep N, --every K, --best B"
        )
    if highest and best is None:
        raise ConfigError("--highest changes the meaning of --best: expected --best B as well")
    if newest_too and rules:
        raise ConfigError(
            "--newest-too works only with WHICH: --keep, --every and --best always keep the newest "
            "checkpoint"
        )
    store, found = _open_directory(directory)
    damaged = [w for w in dict.fromkeys(which) if f"{w}.json" in store.damaged]
    for folder in damaged:
        if f"{folder}.json" in store.newer:
            raise ConfigError(store.fault(f"{folder}.json"))
    if rules:
        stay = retained(found, KeepRules(newest or 1, every or 0, best or 0, highest))
        to_remove = [m for m in found if m.folder not in stay]
    else:
        named = [_find(store, found, w) for w in which if w not in damaged]
        to_remove = list({m.folder: m for m in named}.values())
        if to_remove and found[0] in to_remove and not newest_too:
            raise ConfigError(
                f"step {found[0].step} is the newest checkpoint: to remove it, add --newest-too"
            )
    if not to_remove and not damaged:
        _echo("nothing to remove")
        return
    steps = ", ".join(str(m.step) for m in to_remove)
    size = byte_size(sum(m.nbytes for m in to_remove))
    what = f"{len(to_remove)} of {counted(len(found), 'checkpoint')} in {store.place.url}"
    if to_remove:
        what += f": steps {steps}, {size}"
    if damaged:
        what += f", and those with a damaged manifest: {', '.join(damaged)}"
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(
                f"this removes {what}: standard input is no terminal; confirm with --yes"
            )
        click.confirm(f"this removes {what}\ncontinue?", abort=True, err=True)
    for folder in (*(m.folder for m in to_remove), *damaged):
        with _as_checkpoint_errors():
            store.remove(folder)
        _echo(f"removed {store.place.url}/{folder}")
