"""What ``Checkpointer.load`` fills a state with: the newest checkpoint, or the first values.

This is imported at the first load.
"""

import logging
import os
from collections.abc import Callable, Mapping

from dlrover_py.checkpoint.directory import CheckpointDirectory
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer import restore, session
from dlrover_py.trainer.calls import CallsDifferError
from dlrover_py.trainer.candidates import CheckpointSources, local_agent
from dlrover_py.trainer.collectives import Ranks
from dlrover_py.trainer.placement import WorkerContext
from dlrover_py.trainer.rollcall import format_by_rank
from dlrover_py.trainer.settings import Settings
from dlrover_py.trainer.sources import Catalog

log = logging.getLogger(__name__)


def load_newest(
    state: Mapping[str, object],
    context: WorkerContext,
    settings: Settings,
    *,
    dir: str | None,
    strict: bool,
    prepare: Callable[[Catalog, Ranks], str],
) -> restore.Loaded | None:
    """Fill the state with the newest checkpoint that all ranks can have. Collective.

    Args:
        state: the state that is filled.
        context: the context of this worker.
        settings: the place of this worker.
        dir: the directory of checkpoints; None if there is none.
        strict: whether a checkpoint whose keys differ from those of the state is refused.
        prepare: called on all ranks before a candidate is copied; it returns why the candidate
            cannot be had, the same on all ranks; empty if it can.

    Returns:
        What was loaded; None if there is no checkpoint.

    Raises:
        CheckpointError: there are checkpoints but none could be read.
        ConfigError: the state cannot be loaded.
        UnreachableError: the transfer server of the agent does not answer.
        RuntimeError: another rank is gone.
    """
    with local_agent(settings.transfer_socket) as agent:
        sources = CheckpointSources(
            pool=context.folder,
            agent=agent,
            store=None if dir is None else CheckpointDirectory(dir),
            round=context.round,
            job=context.job,
            rejected=settings.rejected,
        )
        found = restore.load(
            state,
            sources,
            rank=context.rank,
            world=context.world,
            log=log,
            strict=strict,
            prepare=prepare,
        )
    if found is not None:
        session.note_load()
    return found


def initialize(
    state: Mapping[str, object],
    context: WorkerContext,
    init: str | os.PathLike[str] | None,
    *,
    dir: str | None,
    strict: bool,
) -> None:
    """Give the state the values of ``init``; without ``init`` the state stays as it is. Collective.

    Args:
        state: the state that is filled.
        context: the context of this worker.
        init: a folder or address that ``torch.distributed.checkpoint.save`` has written, or None.
        dir: the directory of checkpoints; None if there is none.
        strict: whether values whose keys differ from those of the state are refused.

    Raises:
        CallsDifferError: some ranks pass ``init``, and others do not.
        CheckpointError: the values cannot be read.
        ConfigError: there is no ``init``, and the directory of checkpoints is itself a checkpoint.
    """
    calls = context.gather("load()" if init is None else "load(init=…)")
    if len(set(calls)) > 1:
        raise CallsDifferError(
            "checkpoint: the ranks have made different calls where all must make the same one: "
            f"{format_by_rank(dict(enumerate(calls)))}: pass init on every rank, or on none"
        )
    if init is not None:
        # It imports much of torch that other checkpoints do not need.
        from dlrover_py.trainer.dcp_import import load_dcp

        where = os.fspath(init)
        load_dcp(state, where, rank=context.rank, world=context.world, strict=strict, log=log)
    elif dir is not None and (problem := CheckpointDirectory(dir).single_checkpoint_error()):
        raise ConfigError(
            f"{problem}: name the folder above it, or load(state, init=…) to begin with it"
        )
