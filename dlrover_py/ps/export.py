"""Writes the tables of a cut into one file that other programs read."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dlrover_py.process.ownership import replaced_when_whole
from dlrover_py.protocol.errors import CheckpointError, ConfigError
from dlrover_py.ps.cuts import SavedCut
from dlrover_py.ps.hashing import Floats, Ids
from dlrover_py.ps.specs import TableSpec

EXTRAS = {".safetensors": "torch", ".parquet": "parquet", ".pt": "ps"}
"""The extra with the library for each kind of file, by the end of the name."""


def export(cut: SavedCut, out: Path, *, replace: bool = False) -> None:
    """Write ids and rows of all tables. The file appears when it is complete.

    The end of the name says the form. ``.safetensors`` and ``.pt`` have two tensors for each table:
    ``NAME.ids``, int64 ``[n]``, ascending, and ``NAME.weight``, float32 ``[n, dim]``. All tables
    are in memory then. ``.parquet`` has the columns ``table``, ``id`` and ``weight``, a list of
    floats, and a row for each id. One bucket is in memory then.

    Args:
        cut: The cut.
        out: The new file.
        replace: Whether it may take the place of an older file.

    Raises:
        ConfigError: The name has another end, the file exists, or a library is missing.
        CheckpointError: The cut is damaged, or the file cannot be written.
    """
    check_name(out)
    if out.exists() and not replace:
        raise ConfigError(f"{out} exists already: choose another path, or remove it")
    try:
        with _imports(out.suffix), replaced_when_whole(out) as part:
            if out.suffix == ".parquet":
                _parquet(cut, part)
            elif out.suffix == ".pt":
                import torch

                found = {name: torch.from_numpy(array) for name, array in _arrays(cut).items()}
                torch.save(found, part)
            else:
                from safetensors import SafetensorError
                from safetensors.numpy import save_file

                try:
                    save_file(_arrays(cut), part)
                except SafetensorError as error:  # such as a full disk
                    raise CheckpointError(f"{out}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{out}: {error.strerror or error}") from error
    except RuntimeError as error:  # of torch, such as a full disk
        raise CheckpointError(f"{out}: {error}") from error


def check_name(out: Path) -> None:
    """Check that the end of a file's name says a form.

    Raises:
        ConfigError: It does not.
    """
    if out.suffix not in EXTRAS:
        raise ConfigError(f"{out}: expected a name that ends with {', '.join(EXTRAS)}")


@contextmanager
def _imports(suffix: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a {suffix} file needs {error.name}, which is not installed: install DLRover-Py with "
            f"its extra {EXTRAS[suffix]}"
        ) from error


def _rows(cut: SavedCut, spec: TableSpec, bucket: int) -> tuple[Ids, Floats]:
    record = cut.record(spec, bucket)
    return record[0], record[1]


def _arrays(cut: SavedCut) -> dict[str, Any]:
    found = {}
    for spec in cut.document.tables:
        parts = [_rows(cut, spec, bucket) for bucket in range(cut.buckets)]
        ids = np.concatenate([one for one, _ in parts])
        order = np.argsort(ids)
        found[f"{spec.name}.ids"] = ids[order]
        found[f"{spec.name}.weight"] = np.concatenate([rows for _, rows in parts])[order]
    return found


def _parquet(cut: SavedCut, path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    names = pa.dictionary(pa.int32(), pa.string())
    columns = [("table", names), ("id", pa.int64()), ("weight", pa.list_(pa.float32()))]
    schema = pa.schema(columns)
    with parquet.ParquetWriter(path, schema) as writer:
        for spec in cut.document.tables:
            name = pa.array([spec.name])
            for bucket in range(cut.buckets):
                ids, rows = _rows(cut, spec, bucket)
                if not len(ids):
                    continue
                starts = np.arange(0, rows.size + 1, spec.dim, dtype=np.int32)
                weights = pa.ListArray.from_arrays(starts, rows.reshape(-1))
                zeros = pa.array(np.zeros(len(ids), np.int32))
                tables = pa.DictionaryArray.from_arrays(zeros, name)
                writer.write_table(pa.table([tables, ids, weights], schema=schema))
