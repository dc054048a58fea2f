"""Ranks that read data together must have the same position, and the same arguments."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import TypeVar

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer import session
from dlrover_py.trainer.collectives import gather, rank_and_world
from dlrover_py.trainer.data.sampler import ElasticSampler
from dlrover_py.trainer.rollcall import RollCall, format_by_rank
from dlrover_py.trainer.torch_compat import store_of_default_group

T = TypeVar("T")
log = logging.getLogger(__name__)

CALL = "iter(loader)"
"""The call that all ranks must make together, for messages."""
_numbers = itertools.count()
"""Numbers the loaders of this process that several ranks use together."""


class Agreement:
    """Compares the samplers of all ranks, at the start of each loop over a loader."""

    def __init__(self, *, is_shared: bool = False) -> None:
        """Create it for one loader.

        Args:
            is_shared: several ranks may have the same place in their samplers, and then read the
                same samples. Otherwise the place is that in the process group.
        """
        self.is_shared = is_shared
        self._rollcall: RollCall | None = None

    def check(
        self, sampler: ElasticSampler, note: T, options: Mapping[str, object]
    ) -> tuple[list[T], bool]:
        """Raise on every rank if the ranks would read other samples than they should.

        This call is collective. If a rank does not make it, the log names that rank after some
        seconds. A single worker does nothing.

        Args:
            sampler: the sampler of this rank.
            note: anything for the other ranks.
            options: further arguments of the loader, which all ranks must have in common.

        Returns:
            The notes of all ranks, in the order of ranks; and whether this rank is the first one
            with its samples.

        Raises:
            ConfigError: the ranks have other positions or arguments; the sampler was made for
                another world; a part of the samples has fewer ranks than another one; several
                workers have no process group; or a rank does not begin the loop within 30 minutes.
        """
        group = rank_and_world()
        if group is None:
            if (size := max(session.world().size, sampler.world * self.is_shared)) > 1:
                raise ConfigError(
                    f"data: the world has {size} workers, but there is no process group: call "
                    "torch.distributed.init_process_group() before the loop over the loader"
                )
            return [note], True
        if not self.is_shared and group != (sampler.rank, sampler.world):
            raise ConfigError(
                f"data: the sampler was made for rank {sampler.rank} of {sampler.world}, but the "
                f"process group has rank {group[0]} of {group[1]}: create the loader after "
                "init_process_group()"
            )
        if group[1] == 1 and not self.is_shared:
            return [note], True
        if self._rollcall is None:
            self._rollcall = RollCall(
                *group,
                store_of_default_group(),
                name=f"loader-{next(_numbers)}",
                report=lambda words: log.warning("data: %s", words),
            )
        self._rollcall.check_in(CALL, CALL)
        own = {
            **sampler.state_dict(),
            "global_batch": sampler.global_batch,
            "micro_batch": sampler.micro_batch,
            **options,
        }
        everyone: list[tuple[T, int, int, dict[str, object]]] = gather(
            (note, sampler.rank, sampler.world, own), group[1]
        )
        places = [place for _, place, _, _ in everyone]
        sizes = {size for _, _, size, _ in everyone}
        counts = {places.count(place) for place in range(sampler.world)}
        if len(sizes) > 1 or len(counts) > 1:
            found = {
                rank: f"{place} of {size}" for rank, (_, place, size, _) in enumerate(everyone)
            }
            raise ConfigError(
                f"data: divide_among() got the places {format_by_rank(found)}: expected each "
                "place from 0 on equally often, and one size"
            )
        if words := difference([each for *_, each in everyone]):
            raise ConfigError(
                f"data: the ranks differ: {words}: create the loader with the same arguments and "
                "the same data, and load the same checkpoint, on every rank"
            )
        return [each for each, *_ in everyone], places.index(sampler.rank) == group[0]


def difference(ranks: Sequence[Mapping[str, object]]) -> str:
    """Return, in words, the first value in which the ranks differ; "" if they agree. Pure.

    Args:
        ranks: values by name, in the order of ranks; each rank has the same names.
    """
    for name in ranks[0]:
        values = {rank: f"{name}={each[name]}" for rank, each in enumerate(ranks)}
        if len(set(values.values())) > 1:
            return format_by_rank(values)
    return ""
