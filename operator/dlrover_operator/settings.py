"""The operator's command line."""

import argparse
import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import get_args

from dlrover_operator.allotment import SharedHosts
from dlrover_operator.host_watch import Mode
from dlrover_operator.manifests import Options
from dlrover_py.protocol import json_text, names
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job import HOST_LABEL
from dlrover_py.protocol.quantities import quantity
from dlrover_py.protocol.status import PROGRESS_S

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
"""Permitted log levels."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the operator that the command line can change."""

    masters: Options
    """Settings for all masters."""
    namespaces: tuple[str, ...]
    """Namespaces whose jobs the operator manages; empty: all namespaces."""
    health: str
    """``host:port`` of the health and metrics pages."""
    log_level: str
    shared: SharedHosts | None = None
    """Hosts that the jobs share; None: no nodes are allotted."""
    kueue: bool = False
    """Whether jobs may be in queues of Kueue."""
    gangs: bool = False
    """Whether PodGroups that templates name are kept."""
    bad_hosts: Mode = "tell"
    """What follows if hosts fail in several jobs."""
    host_labels: tuple[str, ...] = ()
    """Labels of hosts that are copied to the Pods of workers on them."""
    dashboard_port: int = 0
    """Port of the pages for a browser on the loopback device; 0: they are not served."""

    @classmethod
    def parse(cls, argv: Sequence[str] | None = None) -> "Settings":
        """Return the settings in a command line.

        A wrong option, or a missing ``--master-image``, ends the process with a message and exit
        code 2. ``--help`` ends it with exit code 0.

        Args:
            argv: the arguments; None: those of this process.

        Raises:
            ConfigError: ``--master-resources`` is no JSON object, or has other fields than
                ``requests`` and ``limits``. The values of these fields are not checked. Or both
                ways to say what jobs share are given, or ``--allocator-slot`` or
                ``--allocator-pools`` without hosts.
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
        return cls(
            options,
            namespaces,
            args.health,
            args.log_level,
            _shared(args),
            kueue=args.kueue,
            gangs=args.gangs,
            bad_hosts=args.bad_hosts,
            host_labels=tuple(dict.fromkeys(args.host_label)),
            dashboard_port=args.dashboard_port,
        )


def _resources(text: str) -> dict[str, object]:
    """Return the value of ``--master-resources``. The quantities in it are not checked.

    Raises:
        ConfigError: the text is no JSON object, or has other fields than requests and limits.
    """
    try:
        resources = json_text.decoded(text)
    except ValueError as error:
        raise ConfigError(f"--master-resources: not JSON: {error}") from error
    if not isinstance(resources, dict) or not resources.keys() <= {"requests", "limits"}:
        raise ConfigError(
            f"--master-resources is {text}: expected an object with requests and limits, as a "
            "container has them"
        )
    return resources


def _shared(args: argparse.Namespace) -> SharedHosts | None:
    """Return what the jobs share; None if nothing is said.

    Raises:
        ConfigError: the options contradict each other.
    """
    if args.allocator_capacity and args.allocator_nodes:
        raise ConfigError(
            "--allocator-capacity and --allocator-nodes: expected one of them, found both"
        )
    for option, value in (("slot", args.allocator_slot), ("pools", args.allocator_pools)):
        if value and not args.allocator_nodes:
            raise ConfigError(
                f"--allocator-{option} needs --allocator-nodes: found no labels of hosts"
            )
    if not (args.allocator_capacity or args.allocator_nodes):
        return None
    return SharedHosts(
        capacity=args.allocator_capacity,
        selector=args.allocator_nodes,
        slot=dict(args.allocator_slot),
        hold_s=args.allocator_hold,
        pool_label=args.allocator_pools or "",
    )


def _slot(text: str) -> tuple[str, Decimal]:
    """Return a resource and its amount, from a text such as ``nvidia.com/gpu=8``.

    Raises:
        ArgumentTypeError: the text has another form, or the amount is not above 0.
    """
    resource, _, amount = text.rpartition("=")
    with contextlib.suppress(ValueError):
        if resource and (size := quantity(amount)) > 0:
            return resource, size
    raise argparse.ArgumentTypeError(f"{text!r}: expected RESOURCE=QUANTITY: nvidia.com/gpu=8")


def _label(text: str) -> str:
    """Return the name of a label of hosts.

    Raises:
        ArgumentTypeError: the text is no such name, or may be the name of a Pod's own label.
    """
    prefix, slash, _ = text.partition("/")
    own = names.LABEL_JOB.partition("/")[0]
    if not slash or prefix == own or not re.fullmatch(HOST_LABEL, text):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a label of hosts with a prefix, as topology.kubernetes.io/zone"
        )
    return text


def _count(text: str) -> int:
    """Return a number of nodes of at least 0.

    Raises:
        ArgumentTypeError: the text is no such number.
    """
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r}: expected a number of nodes")


def _port(text: str) -> int:
    """Return the number of a port.

    Raises:
        ArgumentTypeError: the text is no such number.
    """
    if text.isascii() and text.isdecimal() and 1 <= (port := int(text)) <= 65535:
        return port
    raise argparse.ArgumentTypeError(f"{text!r}: expected a port from 1 to 65535")


def _seconds(text: str) -> float:
    """Return a number of seconds from 1 to 3600.

    Raises:
        ArgumentTypeError: the text is no number, or is out of the range.
    """
    with contextlib.suppress(ValueError):
        if 1 <= (seconds := float(text)) <= 3600:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r}: expected seconds from 1 to 3600")


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(
        prog="dlrover-operator", description="Runs the masters of ElasticJobs."
    )
    p.add_argument("--master-image", required=True, metavar="IMAGE", help="image of the masters")
    p.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="NS",
        help="run only the jobs of this namespace; may be given several times "
        "(default: all namespaces)",
    )
    p.add_argument(
        "--health",
        default=":8080",
        metavar="HOST:PORT",
        help="address of health and metrics (default: port 8080 at all addresses)",
    )
    p.add_argument(
        "--image-pull-policy",
        default="",
        choices=("", "Always", "IfNotPresent", "Never"),
        help="pull policy of the masters' image",
    )
    p.add_argument(
        "--image-pull-secret",
        action="append",
        default=[],
        metavar="NAME",
        help="pull secret of the masters' image, in the job's namespace; may be given several "
        "times",
    )
    p.add_argument(
        "--master-resources",
        default="",
        metavar="JSON",
        help="requests and limits of a master whose job sets none",
    )
    p.add_argument(
        "--workers-network-policy",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="only the Pods of a job can connect to its workers",
    )
    p.add_argument(
        "--progress-interval",
        type=_seconds,
        default=PROGRESS_S,
        metavar="SECONDS",
        help="interval between two writes of a job's progress into its status; with more than 500 "
        "jobs it grows with their number (default: %(default)g)",
    )
    p.add_argument(
        "--allocator-capacity",
        type=_count,
        default=0,
        metavar="N",
        help="allot N nodes to the jobs (default: no nodes are allotted)",
    )
    p.add_argument(
        "--allocator-nodes",
        default="",
        metavar="SELECTOR",
        help="allot the hosts with these labels to the jobs",
    )
    p.add_argument(
        "--allocator-slot",
        type=_slot,
        action="append",
        default=[],
        metavar="RESOURCE=QUANTITY",
        help="what a node of a job takes of a host; may be given several times (default: the whole "
        "host)",
    )
    p.add_argument(
        "--allocator-pools",
        type=_label,
        metavar="LABEL",
        help="label of the hosts whose value is the name of their pool: the allocator chooses the "
        "pools of a job's nodes (default: the scheduler alone places Pods)",
    )
    p.add_argument(
        "--allocator-hold",
        type=_seconds,
        default=300.0,
        metavar="SECONDS",
        help="time for which a size is kept that was chosen for the sake of speed "
        "(default: %(default)g)",
    )
    p.add_argument(
        "--kueue",
        action="store_true",
        help="run jobs with the label kueue.x-k8s.io/queue-name as Kueue admits them",
    )
    p.add_argument(
        "--gangs",
        action="store_true",
        help="keep the PodGroups that Pod templates name for Volcano, the coscheduling plug-in or "
        "the gang scheduling of Kubernetes itself",
    )
    p.add_argument(
        "--bad-hosts",
        choices=get_args(Mode),
        default="tell",
        help="what follows if a host fails in several jobs: nothing, a notice to all jobs, or new "
        "nodes avoid it, too (default: %(default)s)",
    )
    p.add_argument(
        "--host-label",
        type=_label,
        action="append",
        default=[],
        metavar="LABEL",
        help="copy this label from each host to the Pods of workers on it, for the order of ranks; "
        "may be given several times (default: none)",
    )
    p.add_argument(
        "--dashboard-port",
        type=_port,
        default=0,
        metavar="PORT",
        help="serve pages about jobs and hosts for a browser on this port of the loopback device "
        "(default: no pages)",
    )
    p.add_argument("--log-level", default="INFO", choices=LEVELS)
    return p
