"""The options of a Checkpointer: its arguments, the job's ``checkpoint:`` section, defaults."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.persister import KeepRules
from dlrover_py.trainer.schedule import EVERY, PERSIST_EVERY, JobAge, SaveInterval, ScheduleRules
from dlrover_py.trainer.settings import Settings


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """Where checkpoints are stored, how often, and how many stay."""

    dir: str | None
    """Address of the directory of checkpoints; None: they are kept only in memory."""
    rules: ScheduleRules
    """How often to save."""
    keep: KeepRules
    """Which checkpoints stay in the directory."""
    age: JobAge
    """What is known of the job."""

    @classmethod
    def choose(
        cls,
        settings: Settings,
        *,
        dir: str | os.PathLike[str] | None,
        every: int | str | None,
        persist_every: int | str | None,
        keep: int | Mapping[str, int] | KeepRules | None,
    ) -> Self:
        """Return the options: those of the script, else those of the job, else defaults.

        The directory is not looked at; only the form of its address is checked.

        Args:
            settings: the settings of this worker, with the job's section.
            dir: as the argument of a Checkpointer.
            every: as the argument of a Checkpointer.
            persist_every: as the argument of a Checkpointer.
            keep: as the argument of a Checkpointer.

        Raises:
            ConfigError: ``dir`` is not a valid address, an interval has none of its forms, or
                ``keep`` is neither a number nor a set of rules.
        """
        job = settings.checkpoint
        where = dir if dir is not None else job.get("dir")
        rules = ScheduleRules(
            SaveInterval.parse("every", _first(every, job.get("every"), EVERY)),
            SaveInterval.parse(
                "persist_every", _first(persist_every, job.get("persistEvery"), PERSIST_EVERY)
            ),
            stores=where is not None,
            first_is_early=persist_every is None
            and "persistEvery" not in job
            and not settings.pool,
        )
        age_s = float(job["ageS"] or 0.0) if "ageS" in job else None
        return cls(
            None if where is None else _directory(where),
            rules,
            _keep(_first(keep, job.get("keep"), KeepRules())),
            JobAge(age_s, settings.restart_count),
        )


def _first(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)


def _directory(where: str | os.PathLike[str]) -> str:
    """Return the normal form of a directory's address. Nothing is read or created.

    A path becomes absolute. Only the form is checked: an unknown protocol such as ``s4://`` is
    accepted here.

    Raises:
        ConfigError: the form is not valid, or the address is in ``memory://``. Such a directory
            exists only inside the process that writes it.
    """
    from dlrover_py.checkpoint.directory import address

    found = address(where)
    if found.startswith("memory://"):
        raise ConfigError(
            f"checkpoint directory {found}: it is the memory of the process that writes, and goes "
            "with it; omit the directory to keep checkpoints in the job's memory"
        )
    return found


def _keep(value: object) -> KeepRules:
    """Return the rules of retention, from rules, a number of newest checkpoints, or a mapping.

    A rule that is missing or None in the mapping has its default.

    Raises:
        ConfigError: the value is none of these, the number is below 1, or a rule is unknown. Also
            if ``highest`` is no boolean, or another rule is no whole number from 0.
    """
    if isinstance(value, KeepRules):
        return value
    if type(value) is int and value >= 1:
        return KeepRules(newest=value)
    if isinstance(value, Mapping):
        numbers = [v for k, v in value.items() if v is not None and k != "highest"]
        rightly = all(type(v) is int and v >= 0 for v in numbers)
        rightly &= value.get("highest") in (None, False, True)
        if rightly and value.keys() <= KeepRules().rules.keys():
            return KeepRules.of(value)
    raise ConfigError(
        f"checkpoint: keep is {value!r}: expected a number, or "
        '{"last": 3, "every": 1000, "best": 2, "highest": True} or a part of that'
    )
