"""What a table of the parameter server is: its rows, their first values and their optimizer."""

import math
import re
from dataclasses import dataclass, field
from enum import StrEnum

from dlrover_py.protocol.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
"""The form of a table's name."""
MAX_DIM = 8192
"""The largest number of values in a row."""
LEAST_EPS = 2.0**-126
"""The least constant that keeps a denominator above 0: the least number that float32 has in full.
"""
MAX_STALENESS = 1 << 20
MAX_TTL_S = 1e9
"""The longest time, in seconds, after which a row that nobody pushes may be dropped."""
MAX_COUNTED = 200
"""The greatest number of pushes that may be asked for before a row gets memory."""


class OptimizerKind(StrEnum):
    """The rule by which a server changes rows."""

    SGD = "sgd"
    ADAGRAD = "adagrad"
    ROW_ADAGRAD = "row_adagrad"
    ADAM = "adam"
    FTRL = "ftrl"


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer with its constants. Each kind uses those that its constructor names."""

    kind: OptimizerKind
    lr: float
    momentum: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-10
    weight_decay: float = 0.0
    start: float = 0.0
    """First value of Adagrad's sums of squares."""
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 1.0
    """The constant of FTRL's learning rate."""

    def slots(self, dim: int) -> tuple[int, ...]:
        """Return the widths of the arrays that the optimizer keeps for each row."""
        if self.kind is OptimizerKind.SGD:
            return (dim,) if self.momentum else ()
        if self.kind is OptimizerKind.ADAGRAD:
            return (dim,)
        if self.kind is OptimizerKind.ROW_ADAGRAD:
            return (1,)
        return (dim, dim)


class InitKind(StrEnum):
    """The distribution of first values."""

    UNIFORM = "uniform"
    NORMAL = "normal"


@dataclass(frozen=True, slots=True)
class InitSpec:
    """The first values of rows: a function of the seed, the table's name, the id and the column."""

    kind: InitKind = InitKind.NORMAL
    low: float = 0.0
    """The least value, or the mean of a normal distribution."""
    high: float = 1.0
    """The bound above all values, or the standard deviation of a normal distribution."""
    seed: int = 0


class RowFormat(StrEnum):
    """How a message carries rows or gradients. Servers keep float32 in any case."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"
    """A byte for each value, and a scale for each row; rounded up or down at random."""


@dataclass(frozen=True, slots=True)
class Formats:
    """The formats in which a worker gets the rows of a table, and sends its gradients."""

    pull: RowFormat = RowFormat.FP32
    push: RowFormat = RowFormat.FP32
    top: int = 0
    """How many values of a gradient's row are sent; the rest is kept for later. 0: all."""


class ConsistencyKind(StrEnum):
    """What a worker may see of the steps of other workers."""

    ASYNC = "async"
    SSP = "ssp"
    SYNC = "sync"


@dataclass(frozen=True, slots=True)
class Consistency:
    """How the steps of all workers of a job are ordered. It cannot change while a job runs."""

    kind: ConsistencyKind = ConsistencyKind.ASYNC
    staleness: int = 0
    """For ``ssp``: how many steps a worker may be ahead of the slowest one."""
    silence_s: float = 5.0
    """Seconds without a word after which the others go on without a worker."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Which rows of a table get memory on the servers, and keep it."""

    min_count: int = 1
    """Pushes of an id after which it gets a row. The gradients before are dropped."""
    max_rows: int = 0
    """Rows of the table on all servers, without copies. 0: any number."""
    ttl_s: float = 0.0
    """Seconds without a push or a pull after which a row is dropped. 0: never."""


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One table. It cannot change while a job runs."""

    name: str
    dim: int
    optimizer: OptimizerSpec = field(
        default_factory=lambda: OptimizerSpec(OptimizerKind.ADAGRAD, 0.01)
    )
    init: InitSpec = field(default_factory=InitSpec)
    keep: Keep = field(default_factory=Keep)


def check_table(spec: TableSpec) -> None:
    """Check that a table can be made.

    Raises:
        ConfigError: A name, a number or a dimension is outside its bounds.
    """
    if not NAME.fullmatch(spec.name):
        raise ConfigError(
            f"the table's name is {spec.name!r}: expected at most 128 letters, digits and _.-"
        )
    if not 1 <= spec.dim <= MAX_DIM:
        raise ConfigError(
            f"table {spec.name} has {spec.dim} values in a row: expected 1 to {MAX_DIM}"
        )
    numbers = [spec.init.low, spec.init.high]
    numbers += [
        getattr(spec.optimizer, name)
        for name in ("lr", "momentum", "eps", "weight_decay", "start", "l1", "l2", "beta")
    ]
    if not all(math.isfinite(number) for number in numbers):
        raise ConfigError(f"table {spec.name}: expected finite numbers, found {numbers}")
    optimizer = spec.optimizer
    if min(optimizer.lr, optimizer.momentum, optimizer.eps, optimizer.start, optimizer.l1,
           optimizer.l2, optimizer.beta, optimizer.weight_decay) < 0:  # fmt: skip
        raise ConfigError(f"table {spec.name}: the optimizer's constants must not be negative")
    if optimizer.kind is OptimizerKind.FTRL and optimizer.lr == 0:
        raise ConfigError(f"table {spec.name}: FTRL needs a learning rate above 0")
    divides = (OptimizerKind.ADAGRAD, OptimizerKind.ROW_ADAGRAD, OptimizerKind.ADAM)
    if optimizer.kind in divides and optimizer.eps < LEAST_EPS:
        raise ConfigError(
            f"table {spec.name}: a gradient of 0 would be divided by 0: expected an eps above 0, "
            f"found {optimizer.eps}"
        )
    if optimizer.kind is OptimizerKind.FTRL and (
        optimizer.beta / optimizer.lr + optimizer.l2 < LEAST_EPS
    ):
        raise ConfigError(
            f"table {spec.name}: FTRL would divide a gradient of 0 by 0: expected beta or l2 above "
            f"0, found beta={optimizer.beta} and l2={optimizer.l2}"
        )
    if not (0 <= optimizer.beta1 < 1 and 0 <= optimizer.beta2 < 1):
        raise ConfigError(f"table {spec.name}: beta1 and beta2 must be at least 0 and below 1")
    if not 1 <= spec.keep.min_count <= MAX_COUNTED or not 0 <= spec.keep.max_rows < 1 << 48:
        raise ConfigError(
            f"table {spec.name}: expected a min_count of 1 to {MAX_COUNTED} and a max_rows of at "
            f"least 0, found {spec.keep}"
        )
    if spec.keep.ttl_s and not 1 <= spec.keep.ttl_s <= MAX_TTL_S:
        raise ConfigError(
            f"table {spec.name}: expected a ttl_s of 0, or of 1 to {MAX_TTL_S:g} seconds, found "
            f"{spec.keep.ttl_s}"
        )
    if not 0 <= spec.init.seed < 1 << 63:
        raise ConfigError(f"table {spec.name}: the seed must be at least 0 and below 2**63")


def formats(*, pull: str = "fp32", push: str = "fp32", top: int = 0) -> Formats:
    """Return how messages carry the rows and the gradients of a table.

    Args:
        pull: Format of rows: ``fp32``, ``fp16`` or ``bf16``.
        push: Format of gradients: one of these, or ``int8``.
        top: Values of each gradient's row that are sent: the largest ones. The worker keeps the
            rest, and adds it to the next gradient of the row. 0: all values are sent.

    Raises:
        ConfigError: A format is unknown, rows shall come as ``int8``, or ``top`` is negative.
    """
    names = [one.value for one in RowFormat]
    if pull not in names[:-1]:
        raise ConfigError(f"expected pull to be one of {', '.join(names[:-1])}, found {pull!r}")
    if push not in names:
        raise ConfigError(f"expected push to be one of {', '.join(names)}, found {push!r}")
    if not 0 <= top <= MAX_DIM:
        raise ConfigError(f"expected 0 to {MAX_DIM} values of each row, found top={top}")
    return Formats(RowFormat(pull), RowFormat(push), top)


def check_consistency(given: Consistency) -> None:
    """Check that workers can step in this way.

    Raises:
        ConfigError: A number is outside its bounds.
    """
    ssp = given.kind is ConsistencyKind.SSP
    if not (1 if ssp else 0) <= given.staleness <= MAX_STALENESS or (given.staleness and not ssp):
        raise ConfigError(
            f"expected a staleness of 1 to {MAX_STALENESS} for ssp, and of 0 otherwise, found "
            f"{given.staleness} for {given.kind}"
        )
    if not 0 < given.silence_s < math.inf:
        raise ConfigError(f"expected a silence of more than 0 s, found {given.silence_s}")


def sync(*, silence_s: float = 5.0) -> Consistency:
    """Return that the pushes of all workers in a step are applied together.

    Args:
        silence_s: Seconds without a word after which the others go on without a worker.

    Raises:
        ConfigError: The number is not above 0.
    """
    found = Consistency(ConsistencyKind.SYNC, silence_s=silence_s)
    check_consistency(found)
    return found


def ssp(staleness: int, *, silence_s: float = 5.0) -> Consistency:
    """Return that no worker is more than some steps ahead of the slowest one.

    Args:
        staleness: Number of these steps, at least 1; use :func:`sync` instead of 0.
        silence_s: Seconds without a word after which the others go on without a worker.

    Raises:
        ConfigError: A number is outside its bounds.
    """
    found = Consistency(ConsistencyKind.SSP, staleness, silence_s)
    check_consistency(found)
    return found


def keep(*, min_count: int = 1, max_rows: int = 0, ttl_s: float = 0.0) -> Keep:
    """Return which rows of a table get memory on the servers, and keep it.

    Args:
        min_count: Pushes of an id after which it gets a row; at most 200. The gradients before are
            dropped.
        max_rows: Rows of the table on all servers, without copies. Rows that were not pushed
            or pulled for the longest time are dropped when there are more. 0: any number.
        ttl_s: Seconds without a push or a pull after which a row is dropped, at least 1. It goes
            with a later push to its bucket, after an eighth of that time more at the latest. 0:
            never.
    """
    return Keep(min_count, max_rows, ttl_s)


def sgd(lr: float, *, momentum: float = 0.0, weight_decay: float = 0.0) -> OptimizerSpec:
    """Return SGD, as ``torch.optim.SGD``: only the rows of a push change.

    Args:
        lr: Learning rate.
        momentum: Share of the last change that a row keeps; 0 needs no memory.
        weight_decay: L2 penalty, of the rows of a push.
    """
    return OptimizerSpec(OptimizerKind.SGD, lr, momentum=momentum, weight_decay=weight_decay)


def adagrad(lr: float, *, eps: float = 1e-10, start: float = 0.0) -> OptimizerSpec:
    """Return Adagrad, as ``torch.optim.Adagrad``, with a sum of squares for each value.

    Args:
        lr: Learning rate.
        eps: Added to the root of the sum; above 0.
        start: First value of the sums.
    """
    return OptimizerSpec(OptimizerKind.ADAGRAD, lr, eps=eps, start=start)


def row_adagrad(lr: float, *, eps: float = 1e-10, start: float = 0.0) -> OptimizerSpec:
    """Return Adagrad with one sum for each row: the mean of the squares of its gradients.

    Args:
        lr: Learning rate.
        eps: Added to the root of the sum; above 0.
        start: First value of the sums.
    """
    return OptimizerSpec(OptimizerKind.ROW_ADAGRAD, lr, eps=eps, start=start)


def adam(
    lr: float, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> OptimizerSpec:
    """Return lazy Adam: a row changes, and counts a step, only when it is in a push.

    Args:
        lr: Learning rate.
        betas: Decay of the means of gradients and of their squares.
        eps: Added to the root of the second mean; above 0.
    """
    return OptimizerSpec(OptimizerKind.ADAM, lr, beta1=betas[0], beta2=betas[1], eps=eps)


def ftrl(lr: float, *, l1: float = 0.0, l2: float = 0.0, beta: float = 1.0) -> OptimizerSpec:
    """Return FTRL-proximal, whose L1 penalty makes rows sparse.

    Args:
        lr: Learning rate (alpha), above 0.
        l1: L1 penalty.
        l2: L2 penalty.
        beta: Constant of the learning rate of each value. It or ``l2`` is above 0.
    """
    return OptimizerSpec(OptimizerKind.FTRL, lr, l1=l1, l2=l2, beta=beta)


def uniform(low: float, high: float, *, seed: int = 0) -> InitSpec:
    """Return first values that are uniform between two bounds.

    Args:
        low: The least value.
        high: The bound above all values. With ``low``, each value is ``low``.
        seed: Seed; the same one gives each id the same row on any number of servers.
    """
    return InitSpec(InitKind.UNIFORM, low, high, seed)


def normal(mean: float = 0.0, std: float = 1.0, *, seed: int = 0) -> InitSpec:
    """Return first values of a normal distribution, as those of ``nn.Embedding``.

    Args:
        mean: The mean.
        std: The standard deviation.
        seed: Seed; the same one gives each id the same row on any number of servers.
    """
    return InitSpec(InitKind.NORMAL, mean, std, seed)
