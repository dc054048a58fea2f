"""The operator's command line."""

import argparse
import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dlrover_operator.manifests import Options
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.status import PROGRESS_S

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclass(frozen=True, slots=True)
class Settings:
    """What an administrator can set."""

    masters: Options
    namespaces: tuple[str, ...]
    """Where jobs are looked after; none means everywhere."""
    health: str
    log_level: str

    @classmethod
    def parse(cls, argv: Sequence[str] | None = None) -> "Settings":
        """Read the command line.

        Raises:
            ConfigError: a value cannot be used.
        """
        args = _parser().parse_args(argv)
        options = Options(
            image=args.master_image,
            pull_policy=args.image_pull_policy,
            pull_secrets=tuple(args.image_pull_secret),
            workers_policy=args.workers_network_policy,
            progress_s=args.progress_interval,
        )
        if args.master_resources:
            options = replace(options, resources=_resources(args.master_resources))
        namespaces = tuple(dict.fromkeys(args.namespace))
        return cls(options, namespaces, args.health, args.log_level)


def _resources(text: str) -> dict[str, object]:
    try:
        resources = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--master-resources: not JSON: {error}") from error
    if not isinstance(resources, dict) or not resources.keys() <= {"requests", "limits"}:
        raise ConfigError(
            f"--master-resources is {text}: expected an object with requests and limits, as a "
            "container has them"
        )
    return resources


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 1 <= (seconds := float(text)) <= 3600:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r}: expected seconds from 1 to 3600")


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="dlrover-operator", description="Looks after ElasticJobs.")
    p.add_argument(
        "--master-image", required=True, metavar="IMAGE", help="what each job's master runs"
    )
    p.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="NS",
        help="look after jobs here only; may be given several times (default: everywhere)",
    )
    p.add_argument(
        "--health", default="0.0.0.0:8080", metavar="HOST:PORT", help="health and metrics"
    )
    p.add_argument(
        "--image-pull-policy",
        default="",
        choices=("", "Always", "IfNotPresent", "Never"),
        help="of masters",
    )
    p.add_argument(
        "--image-pull-secret",
        action="append",
        default=[],
        metavar="NAME",
        help="of masters, in the job's namespace; may be given several times",
    )
    p.add_argument(
        "--master-resources",
        default="",
        metavar="JSON",
        help="requests and limits of a master whose job has none of its own",
    )
    p.add_argument(
        "--workers-network-policy",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let nobody but the job's Pods reach its workers",
    )
    p.add_argument(
        "--progress-interval",
        type=_seconds,
        default=PROGRESS_S,
        metavar="SECONDS",
        help="between two writes of a job's progress; it grows with the number of jobs, "
        "from 500 jobs on by default (default: %(default)g)",
    )
    p.add_argument("--log-level", default="INFO", choices=LEVELS)
    return p
