"""``dlrover ckpt …``: checkpoints in storage, looked at, checked, taken out and removed.

Everything but tensors in shards is done without torch: a manifest says where the raw bytes are.
"""

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import xxhash

from dlrover_py.cli import view
from dlrover_py.protocol.checkpoint import Keep, Manifest, Written, WrittenObject
from dlrover_py.protocol.errors import CheckpointError, ConfigError
from dlrover_py.storage import Folder, Store, kept

if TYPE_CHECKING:
    import torch

CHUNK = 1 << 24
"""Bytes that are read and summed at once."""
SAFETENSORS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32",
    "int32": "I32", "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16",
    "float32": "F32", "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0", "complex64": "C64",
}  # fmt: skip
"""What its format calls torch's types (safetensors/tensor.rs)."""


@click.group()
def ckpt() -> None:
    """Look at the checkpoints of a directory or bucket, check them, take them out, remove them.

    DIR is a path or an address such as s3://bucket/folder. WHICH is a step, or the name of a
    checkpoint's folder.
    """


directory = click.argument("directory", metavar="DIR")
one_of_them = click.argument("which", required=False)
as_json = click.option("--json", "as_json", is_flag=True, help="For scripts: JSON instead of text.")
yes = click.option("-y", "--yes", is_flag=True, help="Do not ask.")


# --- which ---


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What the store refuses is said in a line, as every other error is."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise CheckpointError(f"{where}{error.strerror or error}") from error


def _all(directory: str) -> tuple[Store, list[Manifest]]:
    store = Store(directory)
    with _told():
        found = store.checkpoints()
        if not found and isinstance(store.place, Folder) and not store.place.path.exists():
            raise ConfigError(f"{store.place.url}: there is no such folder")
    for name, why in store.damaged.items():
        click.echo(f"dlrover: {store.place.url}/{name} is damaged: {why}", err=True)
    return store, found


def _chosen(directory: str, which: str | None) -> tuple[Store, Manifest]:
    """The checkpoint that is meant; the newest, if none is named.

    Raises:
        ConfigError: there is none.
    """
    store, found = _all(directory)
    if not found:
        raise ConfigError(_nothing(store))
    if which is None:
        return store, found[0]
    return store, _named(store, found, which)


def _nothing(store: Store) -> str:
    if wrong := store.mistaken():
        return f"{wrong}: name the folder above it; torch.distributed.checkpoint reads it as it is"
    return f"{store.place.url}: there is no checkpoint"


def _named(store: Store, found: Sequence[Manifest], which: str) -> Manifest:
    for manifest in found:  # the newest of its step
        if which in (str(manifest.step), manifest.folder):
            return manifest
    steps = ", ".join(str(m.step) for m in found[:8]) + (" …" if len(found) > 8 else "")
    raise ConfigError(f"{store.place.url}: no checkpoint {which!r}; there are steps {steps}")


# --- ls, show ---


@ckpt.command("ls")
@directory
@as_json
def list_checkpoints(directory: str, as_json: bool) -> None:
    """What there is, the newest commit first."""
    store, found = _all(directory)
    if as_json:
        click.echo(json.dumps([_row(store, m) for m in found]))
        return
    if not found:
        click.echo(_nothing(store))
        return
    table = _table("STEP", "AGE", "SIZE", "WORLD", "METRIC", "JOB", "FOLDER")
    for m in found:
        metric = "" if m.metric is None else f"{m.metric:g}"
        size = _size(m.nbytes)
        table.add_row(str(m.step), view.age(m.at), size, str(m.world), metric, m.job, m.folder)
    _print(table)


def _row(store: Store, manifest: Manifest) -> dict[str, Any]:
    return {
        "step": manifest.step,
        "where": store.where(manifest),
        "at": round(manifest.at, 3),
        "number": manifest.number,
        "nbytes": manifest.nbytes,
        "tensors": len({w.piece.key for w in manifest.pieces}),
        "world": manifest.world,
        "metric": manifest.metric,
        "job": manifest.job,
        "term": manifest.term,
        "round": manifest.round,
        "notes": list(manifest.notes),
    }


@ckpt.command()
@directory
@one_of_them
@as_json
def show(directory: str, which: str | None, as_json: bool) -> None:
    """What one checkpoint holds: the newest, unless WHICH names another."""
    store, manifest = _chosen(directory, which)
    tensors = _by_key(manifest.pieces)
    if as_json:
        rows = [
            {
                "key": key,
                "dtype": shards[0].piece.dtype,
                "shape": shards[0].piece.whole,
                "nbytes": sum(w.piece.nbytes for w in shards),
                "files": sorted({w.file for w in shards}),
                "shards": len(shards),
            }
            for key, shards in tensors.items()
        ]
        objects = [{"key": o.key, "nbytes": o.nbytes, "file": o.file} for o in manifest.objects]
        whole = _row(store, manifest) | {"tensors": rows, "objects": objects}
        click.echo(json.dumps(whole))
        return
    age = view.age(manifest.at)
    click.echo(f"{store.where(manifest)}: step {manifest.step}, {age} ago, of {manifest.job}")
    metric = "" if manifest.metric is None else f", metric {manifest.metric:g}"
    click.echo(
        f"{_size(manifest.nbytes)} in {len(manifest.files)} files, by {manifest.world} workers"
        + metric
    )
    for note in manifest.notes:
        click.echo(f"note: {note}")
    table = _table("KEY", "TYPE", "SHAPE", "SIZE", "SHARDS")
    for key, shards in tensors.items():
        piece = shards[0].piece
        shape = "×".join(map(str, piece.whole)) or "scalar"
        size = _size(sum(w.piece.nbytes for w in shards))
        table.add_row(key, piece.dtype, shape, size, str(len(shards)))
    for item in manifest.objects:
        table.add_row(item.key, "object", "", _size(item.nbytes), "")
    _print(table)


def _by_key(pieces: Sequence[Written]) -> dict[str, list[Written]]:
    found: dict[str, list[Written]] = {}
    for written in pieces:
        found.setdefault(written.piece.key, []).append(written)
    return found


def _table(*heads: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        right = head in ("STEP", "SIZE", "WORLD", "METRIC", "SHARDS")
        table.add_column(head, justify="right" if right else "left", no_wrap=True)
    return table


def _print(table: Any) -> None:
    from rich.console import Console

    wide = None if sys.stdout.isatty() else 200  # who reads it does not know how wide it is
    Console(highlight=False, width=wide, markup=False).print(table)


def _size(nbytes: int) -> str:
    value, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


# --- reading ---


def _read(
    store: Store, manifest: Manifest, at: Written | WrittenObject, target: memoryview
) -> None:
    """Read a tensor's shard or an object, and compare.

    Raises:
        CheckpointError: its bytes are not those that were written, or are not there.
    """
    key = at.piece.key if isinstance(at, Written) else at.key
    sums = xxhash.xxh3_64()
    with _told():
        for start in range(0, len(target), CHUNK):
            part = target[start : start + CHUNK]
            store.read_into(manifest, at.file, at.position + start, part)
            sums.update(part)
    if sums.intdigest() != at.xxh3:
        raise CheckpointError(
            f"{store.where(manifest)}/{at.file}: {key}: its {len(target)} bytes at {at.position} "
            "are not those that were written"
        )


@contextlib.contextmanager
def _progress(words: str, total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, for people."""
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
        task = bar.add_task(words, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


# --- verify ---


@ckpt.command()
@directory
@one_of_them
@as_json
def verify(directory: str, which: str | None, as_json: bool) -> int:
    """Read every byte, and compare with the digests of when it was staged.

    All checkpoints are read, unless WHICH names one. The exit code is 1 if anything is damaged.
    """
    store, found = _all(directory)
    if which is not None:
        found = [_named(store, found, which)]
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
            parts = len(manifest.pieces) + len(manifest.objects)
            click.echo(f"{where}: whole: {_size(manifest.nbytes)} in {parts} parts")
        for words in wrong:
            click.echo(f"{where}: DAMAGED: {words}")
    if as_json:
        whole = [m.folder for m in found if m.folder not in bad]
        click.echo(json.dumps({"whole": whole, "damaged": bad}))
    return 1 if bad else 0


def _damage(store: Store, manifest: Manifest, *, quiet: bool) -> list[str]:
    """Say what of a checkpoint is not as it was written.

    A file that is whole holds the tensors that were staged, as they were summed while it was
    written. So tensors are only looked at in the others, to name those that are damaged.
    """
    wrong: list[str] = []
    whole: set[str] = set()
    framing: list[str] = []
    total = sum(size for size, _ in manifest.sums) or manifest.nbytes
    with _progress(f"step {manifest.step}", total, quiet=quiet) as advance:
        if manifest.sums:
            for name, (size, xxh3) in zip(manifest.files, manifest.sums, strict=True):
                if _is_whole(store, manifest, name, size, xxh3, advance):
                    whole.add(name)
                else:
                    framing.append(name)
        parts: list[Written | WrittenObject] = [*manifest.pieces, *manifest.objects]
        buffer = bytearray()
        for at in parts:
            if at.file in whole:
                continue
            nbytes = at.piece.nbytes if isinstance(at, Written) else at.nbytes
            if len(buffer) < nbytes:
                buffer = bytearray(nbytes)
            try:
                _read(store, manifest, at, memoryview(buffer)[:nbytes])
            except CheckpointError as error:
                wrong.append(str(error).removeprefix(f"{store.where(manifest)}/"))
                framing = [name for name in framing if name != at.file]
            if not manifest.sums:
                advance(nbytes)
        wrong += [
            f"{name}: what stands around its tensors is not what was written: load() reads them "
            "all the same, and torch.distributed.checkpoint may not"
            for name in framing
        ]
        try:
            with _told():
                index = store.place.read(f"{manifest.folder}/.metadata")
            if manifest.index and xxhash.xxh3_64_intdigest(index) != manifest.index:
                raise CheckpointError(".metadata: the bytes are not those that were written")
        except CheckpointError as error:
            wrong.append(f"torch cannot load it: {error}")
    return wrong


def _is_whole(
    store: Store,
    manifest: Manifest,
    name: str,
    size: int,
    xxh3: int,
    advance: Callable[[int], None],
) -> bool:
    """Read a file from end to end and compare its digest.

    Args:
        store: where it is.
        manifest: of its checkpoint.
        name: of the file.
        size: its bytes.
        xxh3: their digest.
        advance: told how many bytes were read.
    """
    sums = xxhash.xxh3_64()
    buffer = memoryview(bytearray(min(CHUNK, size)))
    for start in range(0, size, CHUNK):
        part = buffer[: size - start]
        try:
            store.read_into(manifest, name, start, part)
        except OSError:  # the tensors in it are read one by one, and say why
            return False
        sums.update(part)
        advance(len(part))
    return sums.intdigest() == xxh3


# --- export ---


@ckpt.command()
@directory
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--which", help="A step or folder; the newest, if none is named.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["safetensors", "torch"]),
    default="safetensors",
    show_default=True,
    help="torch: one file for torch.load(weights_only=True), with objects too.",
)
@click.option(
    "--keys",
    default="",
    metavar="PREFIX",
    help="Only these, and without the prefix: model. gives what load_state_dict takes.",
)
@click.option(
    "--shard-gb",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="Safetensors of more are split into files of that size, with an index.",
)
def export(
    directory: str, out: Path, which: str | None, form: str, keys: str, shard_gb: float
) -> None:
    """Write the tensors of a checkpoint to OUT, which must not be there.

    Safetensors: OUT is one file if its name ends with .safetensors; else a folder with
    model.safetensors, or with shards of it and model.safetensors.index.json. What belongs to one
    rank alone is left out, unless --keys names it.
    """
    store, manifest = _chosen(directory, which)
    with _told():
        there = out.exists()
    if there:
        raise ConfigError(f"{out} is there: name another, or remove it")
    chosen = [w for w in manifest.pieces if w.piece.key.startswith(keys)]
    objects = [o for o in manifest.objects if o.key.startswith(keys)]
    if not keys.startswith("rank/"):
        chosen = [w for w in chosen if not w.piece.private]
        objects = [o for o in objects if not o.private]
    if not chosen:
        tops = sorted(
            {w.piece.key.split(".", 1)[0] for w in manifest.pieces if not w.piece.private}
        )
        raise ConfigError(
            f"no tensor's key begins with {keys!r}; they begin with {', '.join(tops)}"
        )
    if keys in (*(w.piece.key for w in chosen), *(o.key for o in objects)):
        raise ConfigError(
            f"--keys {keys!r} is a whole key, of which no name would be left: name a shorter prefix"
        )
    tensors = {key.removeprefix(keys): shards for key, shards in _by_key(chosen).items()}
    total = sum(w.piece.nbytes for w in chosen)
    reader = _Reader(store, manifest)
    with _progress(f"step {manifest.step}", total, quiet=False) as advance, _part(out) as part:
        if form == "torch":
            _export_torch(part, tensors, objects, keys, reader, advance)
        else:
            limit = None if out.suffix == ".safetensors" else int(shard_gb * 1e9)
            _export_safetensors(part, tensors, reader, advance, limit)
    for path in sorted(out.iterdir()) if out.is_dir() else [out]:
        click.echo(f"{path}: {_size(path.stat().st_size)}")


class _Reader:
    """Whole tensors, each checked on the way."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store, self.manifest = store, manifest

    def raw(self, shards: Sequence[Written]) -> memoryview:
        """All bytes of a tensor, contiguous."""
        piece = shards[0].piece
        if len(shards) == 1 and piece.shape == piece.whole:
            data = bytearray(piece.nbytes)
            _read(self.store, self.manifest, shards[0], memoryview(data))
            return memoryview(data)
        import torch

        tensor = self.tensor(shards).contiguous().reshape(-1).view(torch.uint8)
        return memoryview(tensor.numpy())

    def tensor(self, shards: Sequence[Written]) -> "torch.Tensor":
        """As torch has it, put together of its shards."""
        import torch

        first = shards[0].piece
        whole = torch.empty(first.whole, dtype=getattr(torch, first.dtype))
        for written in shards:
            piece = written.piece
            data = bytearray(piece.nbytes)
            _read(self.store, self.manifest, written, memoryview(data))
            if not piece.nbytes:
                continue
            box = torch.frombuffer(data, dtype=whole.dtype, count=prod(piece.shape))
            part = whole
            for axis, (start, length) in enumerate(zip(piece.at, piece.shape, strict=True)):
                part = part.narrow(axis, start, length)
            part.copy_(box.reshape(piece.shape))
        return whole


def _export_torch(
    out: Path,
    tensors: dict[str, list[Written]],
    objects: Sequence[WrittenObject],
    keys: str,
    reader: _Reader,
    advance: Callable[[int], None],
) -> None:
    import io

    import torch

    state: dict[str, Any] = {}
    for key, shards in tensors.items():
        state[key] = reader.tensor(shards)
        advance(sum(w.piece.nbytes for w in shards))
    for item in objects:
        data = bytearray(item.nbytes)
        _read(reader.store, reader.manifest, item, memoryview(data))
        state[item.key.removeprefix(keys)] = torch.load(io.BytesIO(data), weights_only=True)
    with out.open("xb") as file:  # a link that another user has put there is not followed
        torch.save(state, file)


@contextlib.contextmanager
def _part(out: Path) -> Iterator[Path]:
    """Where to write a file or a folder, which is OUT once it is whole, and else gone.

    Raises:
        CheckpointError: it cannot be written.
    """
    part = out.with_name(f".{out.name}.part")
    with _told():
        out.parent.mkdir(parents=True, exist_ok=True)
        _clear(part)  # of one that was killed
        try:
            yield part
            part.rename(out)
        finally:
            _clear(part)


def _clear(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _export_safetensors(
    out: Path,
    tensors: dict[str, list[Written]],
    reader: _Reader,
    advance: Callable[[int], None],
    limit: int | None,
) -> None:
    """A file without a limit, else a folder; their format is
    https://github.com/huggingface/safetensors#format."""
    sizes = {}
    for key, shards in tensors.items():
        piece = shards[0].piece
        if piece.dtype not in SAFETENSORS:
            raise ConfigError(f"{key} is {piece.dtype}, which safetensors has not: --format torch")
        sizes[key] = replace(piece, shape=piece.whole).nbytes
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
            piece = tensors[key][0].piece
            head[key] = {
                "dtype": SAFETENSORS[piece.dtype],
                "shape": piece.whole,
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
        whole = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
        (out / "model.safetensors.index.json").write_text(json.dumps(whole, indent=2))


# --- rm ---


@ckpt.command()
@directory
@click.argument("which", nargs=-1)
@click.option("--keep", "newest", type=click.IntRange(min=1), help="All but the newest N.")
@click.option("--every", type=click.IntRange(min=1), help="And but those of each K-th step.")
@click.option("--best", type=click.IntRange(min=1), help="And but the B with the lowest metric.")
@click.option("--highest", is_flag=True, help="The highest metric is the best.")
@click.option("--newest-too", is_flag=True, help="The newest as well, if WHICH names it.")
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
    """Remove the checkpoints that WHICH names, or all that --keep, --every, --best do not keep.

    The newest stays, unless --newest-too says otherwise. A checkpoint's manifest goes first, so
    that none is ever half there. One whose manifest is damaged is named by its folder.
    """
    rules = newest is not None or every is not None or best is not None
    if bool(which) == rules:
        raise ConfigError("say which to remove, or which to keep (--keep N, --every K, --best B)")
    store, found = _all(directory)
    spoilt = [w for w in dict.fromkeys(which) if f"{w}.json" in store.damaged]
    if rules:
        stay = kept(found, Keep(newest or 1, every or 0, best or 0, highest))
        gone = [m for m in found if m.folder not in stay]
    else:
        named = [_named(store, found, w) for w in which if w not in spoilt]
        gone = list({m.folder: m for m in named}.values())
        if gone and found[0] in gone and not newest_too:
            raise ConfigError(
                f"step {found[0].step} is the newest: --newest-too removes it all the same"
            )
    if not gone and not spoilt:
        click.echo("nothing to remove")
        return
    steps = ", ".join(str(m.step) for m in gone)
    size = _size(sum(m.nbytes for m in gone))
    what = f"{len(gone)} of {len(found)} checkpoints in {store.place.url}"
    if gone:
        what += f": steps {steps}, {size}"
    if spoilt:
        what += f", and what may be whole but for its manifest: {', '.join(spoilt)}"
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"this removes {what}: say --yes, as there is nobody to be asked")
        click.confirm(f"this removes {what}\ngo on?", abort=True, err=True)
    for folder in (*(m.folder for m in gone), *spoilt):
        with _told():
            store.remove(folder)
        click.echo(f"removed {store.place.url}/{folder}")
