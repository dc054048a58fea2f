"""The optimizers of servers. Each changes some rows of a table in place."""

from collections.abc import Callable, Sequence

import numpy as np

from dlrover_py.ps.hashing import Floats, Ids
from dlrover_py.ps.specs import OptimizerKind, OptimizerSpec

Update = Callable[[OptimizerSpec, Floats, Sequence[Floats], Ids, Floats], None]


def _sgd(
    spec: OptimizerSpec, rows: Floats, slots: Sequence[Floats], steps: Ids, grads: Floats
) -> None:
    if spec.weight_decay:
        grads = grads + np.float32(spec.weight_decay) * rows
    if spec.momentum:
        slots[0][:] *= np.float32(spec.momentum)
        slots[0][:] += grads
        grads = slots[0]
    rows -= np.float32(spec.lr) * grads


def _adagrad(
    spec: OptimizerSpec, rows: Floats, slots: Sequence[Floats], steps: Ids, grads: Floats
) -> None:
    (squares,) = slots
    changes = grads * grads
    squares += changes
    np.sqrt(squares, out=changes)
    changes += np.float32(spec.eps)
    np.divide(grads, changes, out=changes)
    changes *= np.float32(spec.lr)
    rows -= changes


def _row_adagrad(
    spec: OptimizerSpec, rows: Floats, slots: Sequence[Floats], steps: Ids, grads: Floats
) -> None:
    (squares,) = slots
    squares += np.mean(grads * grads, axis=1, keepdims=True)
    rows -= np.float32(spec.lr) * grads / (np.sqrt(squares) + np.float32(spec.eps))


def _adam(
    spec: OptimizerSpec, rows: Floats, slots: Sequence[Floats], steps: Ids, grads: Floats
) -> None:
    mean, square = slots
    mean += np.float32(1 - spec.beta1) * (grads - mean)
    square *= np.float32(spec.beta2)
    square += np.float32(1 - spec.beta2) * grads * grads
    number = steps.astype(np.float64)[:, None]
    size = (spec.lr / (1 - spec.beta1**number)).astype(np.float32)
    scale = np.sqrt(1 - spec.beta2**number).astype(np.float32)
    rows -= size * mean / (np.sqrt(square) / scale + np.float32(spec.eps))


def _ftrl(
    spec: OptimizerSpec, rows: Floats, slots: Sequence[Floats], steps: Ids, grads: Floats
) -> None:
    linear, squares = slots
    after = squares + grads * grads
    linear += grads - (np.sqrt(after) - np.sqrt(squares)) / np.float32(spec.lr) * rows
    squares[:] = after
    shrunk = np.sign(linear) * np.maximum(np.abs(linear) - np.float32(spec.l1), 0)
    rows[:] = -shrunk / ((spec.beta + np.sqrt(squares)) / spec.lr + spec.l2)


_UPDATES: dict[OptimizerKind, Update] = {
    OptimizerKind.SGD: _sgd,
    OptimizerKind.ADAGRAD: _adagrad,
    OptimizerKind.ROW_ADAGRAD: _row_adagrad,
    OptimizerKind.ADAM: _adam,
    OptimizerKind.FTRL: _ftrl,
}


def update(
    spec: OptimizerSpec, rows: Floats, slots: Sequence[Floats], steps: Ids, grads: Floats
) -> None:
    """Change rows and what the optimizer keeps for them, in place.

    Args:
        spec: The optimizer.
        rows: The values, shape ``[n, dim]``.
        slots: What it keeps: one array for each width of ``spec.slots(dim)``.
        steps: Number of the update of each row, from 1; shape ``[n]``.
        grads: The gradients, shape ``[n, dim]``. They are not changed.
    """
    _UPDATES[spec.kind](spec, rows, slots, steps, grads)


def first_slots(spec: OptimizerSpec, rows: Floats) -> list[Floats]:
    """Return what the optimizer keeps for rows that no update has changed yet.

    Args:
        spec: The optimizer.
        rows: The first values, shape ``[n, dim]``.
    """
    made = [np.zeros((len(rows), width), np.float32) for width in spec.slots(rows.shape[1])]
    if spec.kind in (OptimizerKind.ADAGRAD, OptimizerKind.ROW_ADAGRAD):
        made[0][:] = spec.start
    elif spec.kind is OptimizerKind.FTRL:
        # FTRL computes a row from this sum alone: it must give the first values.
        made[0][:] = -rows * (spec.beta / spec.lr + spec.l2) - np.sign(rows) * spec.l1
    return made
