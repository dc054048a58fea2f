"""Embeddings whose rows are on the servers, and the optimizer step that pushes their gradients.

A forward pass pulls each row of the batch once. The gradient of these rows goes to the servers in
:meth:`Optimizer.step`; the servers' optimizers change the rows.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.ps import specs
from dlrover_py.ps.client import PsClient, default_client
from dlrover_py.ps.hashing import Floats, Ids
from dlrover_py.ps.specs import Consistency, Formats, InitSpec, Keep, OptimizerSpec, TableSpec


class TableOptions(TypedDict, total=False):
    """The options of each table, which :class:`Embedding` explains."""

    optimizer: OptimizerSpec | None
    init: InitSpec | None
    keep: Keep | None
    formats: Formats | None
    padding_idx: int | None
    client: PsClient | None


@dataclass(frozen=True, slots=True)
class _Prefetched:
    """Rows that were asked for before they are needed."""

    ids: Ids
    rows: Future[dict[str, Floats]]
    pushes: int
    """Pushes of the client after which they are too old."""
    restored: int
    """The last return to a cut before."""


class _Rows(nn.Module):
    """A table on the servers. It has no parameters, and its state is not in ``state_dict``."""

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        optimizer: OptimizerSpec | None = None,
        init: InitSpec | None = None,
        keep: Keep | None = None,
        formats: Formats | None = None,
        padding_idx: int | None = None,
        client: PsClient | None = None,
    ) -> None:
        """Make the table, or use the existing one.

        Args:
            name: Name of the table, the same in all workers.
            dim: Values in a row.
            optimizer: How the servers change rows. None: Adagrad with a learning rate of 0.01.
            init: First values of rows. None: normal, as in ``nn.Embedding``.
            keep: Which rows get memory, and keep it. None: all.
            formats: Formats of rows and gradients in messages. None: float32.
            padding_idx: An id whose row is 0 and gets no gradient; a bag leaves it out.
            client: The connection. None: that of this process.

        Raises:
            ConfigError: The table exists with other properties, or a number is wrong.
        """
        super().__init__()
        optimizer, init = optimizer or specs.adagrad(0.01), init or specs.normal()
        self.table = TableSpec(name, dim, optimizer, init, keep or specs.keep())
        self.client = client or default_client()
        self.client.create(self.table, formats)
        self.padding_idx = padding_idx
        self._used: list[tuple[Ids, Tensor]] = []
        self._prefetched: list[_Prefetched] = []

    def prefetch(self, ids: Tensor, *, steps: int = 1) -> None:
        """Ask for the rows of a later batch now.

        The next forward pass with the same ids uses them. They do not have the changes of pushes
        after this call. So with ``ps.sync()``, this does nothing. Rows from before a return to a
        cut are never used.

        Args:
            ids: The ids of the batch.
            steps: Steps of this worker's optimizer after which the rows are too old to be used: 1
                for the next batch, 2 for the one after it. At most 8 batches wait.
        """
        if self.client.synchronous:
            return
        unique, client = np.unique(_int64(ids)), self.client
        restored, until = client.map.restored, client.pushes + steps
        rows = client.pull({self.table.name: unique})
        self._prefetched.append(_Prefetched(unique, rows, until, restored))
        del self._prefetched[:-8]

    def take_gradients(self) -> list[tuple[Ids, Floats]]:
        """Return the gradients since the last call: ids and values, for each forward pass."""
        found = [
            (ids, np.ascontiguousarray(rows.grad.detach().float().cpu().numpy()))
            for ids, rows in self._used
            if rows.grad is not None
        ]
        self._used = []
        return found

    def forget_gradients(self) -> None:
        """Drop the gradients that were not taken. A pass without backward may still get one."""
        self._used = [(ids, rows) for ids, rows in self._used if rows.grad is None]

    def extra_repr(self) -> str:
        """Return the table's name and size, for ``print``."""
        return f"{self.table.name!r}, {self.table.dim}"

    def _rows_of(self, ids: Tensor) -> tuple[Tensor, Tensor, int | None]:
        """Return the rows of the distinct ids, the row number of each id, and that of padding."""
        unique, places = np.unique(_int64(ids), return_inverse=True)
        pushes, restored = self.client.pushes, self.client.map.restored
        fresh = [
            one for one in self._prefetched if one.pushes >= pushes and one.restored == restored
        ]
        found = next((one for one in fresh if np.array_equal(one.ids, unique)), None)
        self._prefetched = [one for one in fresh if one is not found]
        future = found.rows if found is not None else self.client.pull({self.table.name: unique})
        values = future.result()[self.table.name]
        padding = None
        if self.padding_idx is not None and self.padding_idx in unique:
            padding = int(np.searchsorted(unique, self.padding_idx))
            values[padding] = 0
        rows = torch.from_numpy(values).to(ids.device)
        if torch.is_grad_enabled() and self.training:
            rows.requires_grad_()
            self._used.append((unique, rows))
        return rows, torch.from_numpy(places.reshape(ids.shape)).to(ids.device), padding


class Embedding(_Rows):
    """``nn.Embedding`` for any int64 ids: rows come into being when they are first used."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of ids, shape ``[*input.shape, dim]``."""
        rows, places, padding = self._rows_of(input)
        if not len(rows):
            return rows.new_zeros((*input.shape, self.table.dim))
        return functional.embedding(places, rows, padding)


class EmbeddingBag(_Rows):
    """``nn.EmbeddingBag`` for any int64 ids: rows come into being when they are first used."""

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        **options: Unpack[TableOptions],
    ) -> None:
        """Make the table, or use the existing one.

        Args:
            name: Name of the table, the same in all workers.
            dim: Values in a row.
            mode: ``sum``, ``mean`` or ``max``.
            include_last_offset: Whether offsets have the end of the last bag, as a CSR row pointer.
            options: The options of :class:`Embedding`.

        Raises:
            ConfigError: The mode is unknown, or the table exists with other properties.
        """
        if mode not in ("sum", "mean", "max"):
            raise ConfigError(f"table {name}: expected mode sum, mean or max, found {mode!r}")
        super().__init__(name, dim, **options)
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Return one row for each bag, shape ``[bags, dim]``.

        Args:
            input: Ids: shape ``[bags, n]``, or ``[n]`` with ``offsets``.
            offsets: First position of each bag in ``input``.
            per_sample_weights: Weights of the rows, of the shape of ``input``; for mode ``sum``.
        """
        rows, places, padding = self._rows_of(input)
        if not len(rows):
            rows = rows.new_zeros((1, self.table.dim))
        return functional.embedding_bag(
            places,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )


class Optimizer:
    """Pushes the gradients of all tables of a model, and steps the optimizer of its parameters."""

    def __init__(
        self,
        model: nn.Module,
        dense: torch.optim.Optimizer | None = None,
        *,
        scale: float = 1.0,
        consistency: Consistency | None = None,
    ) -> None:
        """Find the tables of a model.

        Args:
            model: The model.
            dense: The optimizer of its parameters, if it has any.
            scale: Factor of the gradients that are pushed. The servers add the pushes of all
                workers: with ``1 / world_size`` the sum is the mean, as that of DDP.
            consistency: How the steps of all workers are ordered: ``ps.sync()`` or ``ps.ssp(n)``.
                None: they are not.

        Raises:
            ConfigError: The model has no table, or other workers use another consistency.
            UnreachableError: The coordinator did not answer.
        """
        self.dense, self.scale = dense, scale
        self._tables = [module for module in model.modules() if isinstance(module, _Rows)]
        if not self._tables:
            raise ConfigError("expected a model with a ps.Embedding or ps.EmbeddingBag")
        if consistency is not None:
            for client in {table.client for table in self._tables}:
                client.use(consistency)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push the gradients, step ``dense``, and wait until the servers have the gradients.

        Args:
            closure: Passed on to ``dense``, which must not be None then. It computes the gradients
                that are pushed, so the push follows the step of ``dense``. If ``dense`` calls it
                several times, it must begin with :meth:`zero_grad`; the last gradients count.

        Raises:
            ConfigError: There is a closure without ``dense``.
        """
        if closure is not None and self.dense is None:
            raise ConfigError("a closure needs an optimizer of the dense parameters")
        result = self.dense.step(closure) if self.dense is not None and closure else None
        waiting = [
            client.push({name: _joined(parts, self.scale) for name, parts in tables.items()})
            for client, tables in self._gradients()
        ]
        if self.dense is not None and closure is None:
            self.dense.step()
        for future in waiting:
            future.result()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that were not pushed, and those of ``dense``."""
        for table in self._tables:
            table.forget_gradients()
        if self.dense is not None:
            self.dense.zero_grad(set_to_none)

    def _gradients(self) -> Iterator[tuple[PsClient, dict[str, list[tuple[Ids, Floats]]]]]:
        """Yield the gradients of each connection, by table."""
        found: dict[int, tuple[PsClient, dict[str, list[tuple[Ids, Floats]]]]] = {}
        for module in self._tables:
            # A step without gradients is a step, too: other workers may wait for it.
            _, tables = found.setdefault(id(module.client), (module.client, {}))
            parts = module.take_gradients()
            if parts:
                tables.setdefault(module.table.name, []).extend(parts)
        yield from found.values()


def _int64(ids: Tensor) -> Ids:
    """Return ids as a flat array.

    Raises:
        ConfigError: They are not int64.
    """
    if ids.dtype != torch.int64:
        raise ConfigError(f"expected ids as torch.int64, found {ids.dtype}")
    flat: Ids = ids.detach().cpu().numpy().reshape(-1)
    return flat


def _joined(parts: list[tuple[Ids, Floats]], scale: float) -> tuple[Ids, Floats]:
    """Return the gradients of several forward passes as those of one, summed by id."""
    ids, grads = parts[0]
    if len(parts) > 1:
        ids, places = np.unique(np.concatenate([one for one, _ in parts]), return_inverse=True)
        grads = np.zeros((len(ids), parts[0][1].shape[1]), np.float32)
        np.add.at(grads, places, np.concatenate([one for _, one in parts]))
    return ids, grads * np.float32(scale) if scale != 1.0 else grads
