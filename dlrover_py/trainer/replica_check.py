"""Compares parameters that must be equal on all data-parallel replicas: finds silent corruption.

Each rank sums its parameters to 8 bytes, and the ranks exchange these. A rank with other bytes than
most of its replicas has computed, or kept, a wrong value.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import xxhash

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.sdk import WrongFields
from dlrover_py.trainer import session
from dlrover_py.trainer.notices import NoticeLog

if TYPE_CHECKING:
    import torch

    from dlrover_py.trainer.placement import WorkerContext

Tensors: TypeAlias = "Iterable[torch.Tensor]"
"""Tensors that must be equal on all replicas."""


def digest(tensors: Tensors) -> int:
    """Return 8 bytes that differ if one bit of a tensor does.

    The tensors are summed where they are, as integers without regard to overflow. So nothing is
    copied from a GPU but 8 bytes for each tensor.
    """
    import torch

    sums = []
    for tensor in tensors:
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if raw.data_ptr() % 8:  # a view in the middle of another tensor
            raw = raw.clone()
        whole = raw.numel() // 8 * 8
        tail = raw[whole:].sum(dtype=torch.int64)
        sums.append(raw[:whole].view(torch.int64).sum() + tail if whole else tail)
    if not sums:
        return 0
    device = sums[0].device
    numbers = torch.stack([one.to(device) for one in sums]).tolist()
    return xxhash.xxh3_64_intdigest(repr(numbers).encode())


def wrong_ranks(answers: Sequence[Mapping[Any, int]]) -> list[int] | None:
    """Return the ranks that differ from the majority of their replicas.

    Args:
        answers: of each rank, the digest by replica group.

    Returns:
        None if all agree. An empty list if no majority shows which ranks are wrong.
    """
    differ = False
    found: set[int] = set()
    for group in {group for answer in answers for group in answer}:
        mine = {rank: answer[group] for rank, answer in enumerate(answers) if group in answer}
        counts = Counter(mine.values()).most_common()
        if len(counts) < 2:
            continue
        differ = True
        most, votes = counts[0]
        if 2 * votes > len(mine):
            found.update(rank for rank, value in mine.items() if value != most)
    return sorted(found) if differ else None


def checked_every(every: object) -> int | None:
    """Return the number of steps after which replicas are compared; None: never.

    Raises:
        ConfigError: it is neither.
    """
    if every is not None and (type(every) is not int or every < 1):
        raise ConfigError(f"checkpoint: compareEvery is {every!r}: expected a number of steps")
    return every


class ReplicaCheck:
    """The comparison of one rank with its replicas."""

    def __init__(self, every: object, notices: NoticeLog) -> None:
        """Create it.

        Args:
            every: number of steps after which replicas are compared; None: never.
            notices: receives a warning if there is nothing to compare.

        Raises:
            ConfigError: ``every`` is neither.
        """
        self._every, self._notices = checked_every(every), notices
        self._named: list[tuple[tuple[int, ...], list[torch.Tensor]]] = []
        self._differ: WrongFields | None = None
        self.good = 0
        """The newest step at which all replicas agreed; they agree after a load."""
        self.took_s = 0.0
        """Seconds that all comparisons have taken."""

    def compare(
        self, tensors: Tensors = (), group: object = None, *, every: int | None = None
    ) -> None:
        """Name tensors that must be equal on all replicas, or set how often they are compared.

        Call it on all ranks, before the first save. The parameters of modules in the state that are
        wrapped in DistributedDataParallel are compared in any case.

        Args:
            tensors: the tensors, whose values must be equal to the last bit on all replicas.
            group: the process group of the replicas; None: all ranks.
            every: number of steps after which replicas are compared, and also before each save that
                goes to storage. None: as the job says.

        Raises:
            ConfigError: ``every`` is not a number of steps.
        """
        if every is not None:
            self._every = checked_every(every)
        self._named.append((_ranks_of(group), list(tensors)))

    def run(
        self, context: "WorkerContext", step: int, state: Mapping[str, object], *, stores: bool
    ) -> bool:
        """Compare the replicas if that is due, and report a difference. Collective if it is.

        Args:
            context: the context of this worker.
            step: the step that is finished; the same on all ranks.
            state: the state that is saved.
            stores: whether a save of this step goes to storage; the same on all ranks.

        Returns:
            Whether the replicas were compared and are equal.
        """
        if self._every is None or context.world == 1 or (step % self._every and not stores):
            return False
        began = time.perf_counter()
        groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for ranks, tensors in [*self._named, *_replicated(state)]:
            groups.setdefault(ranks, []).extend(tensors)
        own = [(ranks, digest(tensors)) for ranks, tensors in groups.items()]
        answers = [
            {tuple(ranks): value for ranks, value in answer} for answer in context.gather(own)
        ]
        self.took_s += time.perf_counter() - began
        if not any(answers):
            self._notices.warn_once(
                "compare_every: the state has no DistributedDataParallel module: name the "
                "parameters that replicas share: "
                "checkpointer.replica_check.compare(model.parameters())"
            )
            return False
        differing = wrong_ranks(answers)
        if differing is None:
            self.good, self._differ = step, None
        else:
            since = step if self._differ is None else self._differ["step"]
            self._differ = {
                "kind": "replicas", "step": since, "good": self.good, "ranks": differing[:64],
                "metric": "", "value": "",
            }  # fmt: skip
            self._notices.warn_once(
                f"replicas differ at step {step}: "
                + (f"rank {', '.join(map(str, differing))}" if differing else "no majority")
            )
        session.report_replicas(self._differ)
        return differing is None


def _ranks_of(group: object) -> tuple[int, ...]:
    """Return the global ranks of a process group; () for all ranks."""
    import torch.distributed as dist

    return () if group is None else tuple(dist.get_process_group_ranks(group))


def _replicated(
    state: Mapping[str, object],
) -> Iterable[tuple[tuple[int, ...], list["torch.Tensor"]]]:
    """Yield the parameters of each DistributedDataParallel module of a state, with its ranks."""
    from torch.nn import Module
    from torch.nn.parallel import DistributedDataParallel

    for value in state.values():
        if isinstance(value, Mapping):
            yield from _replicated(value)
        elif isinstance(value, Module):
            for module in value.modules():
                if isinstance(module, DistributedDataParallel):
                    skipped = module.parameters_to_ignore
                    named = module.module.named_parameters()
                    yield (
                        _ranks_of(module.process_group),
                        [one for name, one in named if name not in skipped],
                    )
