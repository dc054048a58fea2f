"""A reader of job files that reports the line of each error."""

import contextlib
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from dlrover_py.checkpoint.directory import address
from dlrover_py.kubernetes.json_yaml import Loader, fault
from dlrover_py.process.blocking import read_at_most
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job import (
    SERVER_TEMPLATE,
    SERVERS,
    TEMPLATE,
    Container,
    ElasticJob,
    ServerSpec,
)

MAX_JOB_FILE_BYTES = 16 << 20
"""Bytes of the largest job file. Kubernetes itself takes no object of more than 3 MiB."""
SERVER_LIBRARIES = ("zmq", "msgspec", "numpy")
"""Libraries that the master and the servers of a parameter server need."""


@dataclass(frozen=True, slots=True)
class JobDocument:
    """One job of a file: the document as written, and the parsed job."""

    written: dict[str, Any]
    """The document as plain data."""
    job: ElasticJob
    remarks: tuple[str, ...]
    """Unknown fields of the job's templates, each as ``file:line: path: what to do``."""


def load(path: Path) -> JobDocument:
    """Read and check a job file that is run on this machine. No cluster is asked.

    Unknown fields of the templates are no errors, but remarks of the result.

    Raises:
        ConfigError: one line for each error: ``file:line: path: found, expected``.
    """
    name = str(path)
    text = _text(path, name)
    parsed = _parsed(name, text)
    root, document = parsed[0]
    kinds = [one.get("kind") if isinstance(one, dict) else None for _, one in parsed]
    others = [at for at, kind in enumerate(kinds) if kind != names.KIND]
    if others and len(others) < len(kinds):
        with _with_line_numbers(name, parsed[others[0]][0]):
            raise ConfigError(
                f"found {kinds[others[0]]} beside the job: expected an {names.KIND} alone, because "
                "`job run` makes no objects of a cluster"
            )
    with _with_line_numbers(name, parsed[-1][0]):
        if len(parsed) > 1:
            raise ConfigError(
                f"found {len(parsed)} jobs, expected one: `job run` runs a single job"
            )
    with _with_line_numbers(name, root):
        job = ElasticJob.parse(document)
        _check_local(job)
        _check_deadline(job)
    return JobDocument(document, job, _remarks(name, root, job))


def load_all(path: Path) -> list[JobDocument]:
    """Read and check all jobs of a file, or of standard input (``-``), for a cluster.

    No cluster is asked. If one job has an error, none is returned. Unknown fields of the templates
    are no errors, but remarks of the result.

    Raises:
        ConfigError: one line for each error: ``file:line: path: found, expected``.
    """
    name = "standard input" if str(path) == "-" else str(path)
    text = _text(path, name)
    found, faults = [], []
    for root, document in _parsed(name, text):
        try:
            with _with_line_numbers(name, root):
                job = ElasticJob.parse(document, on_cluster=True)
                _check_images(job)
                _check_deadline(job)
            found.append(JobDocument(document, job, _remarks(name, root, job)))
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError("\n".join(faults))
    return found


class _Loader(Loader):
    """A YAML loader that refuses duplicate keys. Plain YAML would silently use the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Check the keys of a mapping before merges (``<<``) add others.

        Raises:
            MarkedYAMLError: a key occurs twice.
        """
        node = super().compose_mapping_node(anchor)
        first: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            if key.value in first:
                text = f"the key {key.value!r} occurs twice, first on line {first[key.value]}"
                raise fault(f"{text}: remove one of them", key)
            first[key.value] = line
        return node


def run_command(path: Path, *options: str) -> list[str]:
    """Return the command line of a process that runs the job of a file on this machine.

    It is ``dlrover job run`` of this installation, and imports nothing from the working directory.

    Args:
        path: The job file.
        options: Options of ``dlrover job run``.
    """
    program = "from dlrover_py.cli import main; raise SystemExit(main())"
    return [sys.executable, "-P", "-c", program, "job", "run", str(path), *options]


def _text(path: Path, name: str) -> str:
    """Return the text of a file, or of standard input (``-``).

    Raises:
        ConfigError: it cannot be read, is not UTF-8, or is larger than ``MAX_JOB_FILE_BYTES``.
    """
    try:
        standard_input = contextlib.nullcontext(sys.stdin.buffer)
        with standard_input if str(path) == "-" else path.open("rb", 0) as file:
            data = read_at_most(file, MAX_JOB_FILE_BYTES)
        if data is not None:
            return data.decode()
        why = f"it has more than {MAX_JOB_FILE_BYTES >> 20} MiB: expected a file with jobs"
    except OSError as error:
        why = error.strerror or str(error)
    except UnicodeDecodeError:
        why = "it is not UTF-8 text"
    raise ConfigError(f"{name}: {why}")


def _parsed(name: str, text: str) -> list[tuple[yaml.Node | None, Any]]:
    """Return each document as a tree that has line numbers and as plain data; at least one pair.

    Empty documents are left out. Without any other, the only pair is ``(None, None)``.

    Raises:
        ConfigError: the text is not valid YAML; the message names the line.
    """
    try:
        roots = list(yaml.compose_all(text, Loader=_Loader))
        documents = list(yaml.load_all(text, Loader=_Loader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark is not None else name
        what = getattr(error, "problem", None) or "cannot be read"
        if name.endswith(".py"):
            what += (
                f"; expected a job file, found a script: elastic-run {shlex.quote(name)} runs it"
            )
        raise ConfigError(f"{where}: not valid YAML: {what}") from error
    except (ValueError, RecursionError) as error:  # an impossible date, or endless nesting
        raise ConfigError(f"{name}: not valid YAML: {error}") from error
    pairs: list[tuple[yaml.Node | None, Any]] = [
        (r, _as_created(d)) for r, d in zip(roots, documents, strict=True) if d is not None
    ]
    return pairs or [(None, None)]


def _as_created(document: Any) -> Any:
    """Return a document as the API server takes it at a creation: no status, and no null fields.

    ``kubectl get -o yaml`` writes both. A Helm template often leaves fields that are null, such as
    ``env:`` with nothing below it. A null ``metadata`` or ``spec`` is left to the parser.
    """
    if not isinstance(document, dict):
        return document
    return {key: _without_nulls(value) for key, value in document.items() if key != "status"}


def _without_nulls(value: Any) -> Any:
    """Return plain data without the fields that are null, on all levels. Items of lists stay."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


@contextlib.contextmanager
def _with_line_numbers(name: str, root: yaml.Node | None) -> Iterator[None]:
    """Add to each line of a ConfigError of the block its file and line; let other errors pass."""
    try:
        yield
    except ConfigError as error:
        lines = [
            f"{name}:{_line_of(root, line.partition(': ')[0])}: {line}"
            for line in str(error).splitlines()
        ]
        raise ConfigError("\n".join(lines)) from error


def _remarks(name: str, root: yaml.Node | None, job: ElasticJob) -> tuple[str, ...]:
    """Return the remarks about unknown fields of the job's templates."""
    unknown = [fault for fault in job.template_faults() if fault.unknown]
    return tuple(f"{name}:{_line_of(root, fault.path)}: {fault}" for fault in unknown)


def _check_local(job: ElasticJob) -> None:
    """Raise ConfigError for a job that cannot run on this machine; otherwise do nothing."""
    where = "spec.replicaSpecs.worker.template.spec.containers[main]"
    container = job.worker.container()
    if not container.command:
        raise ConfigError(
            f"{where}.command: missing; expected a command such as [elastic-run, train.py], "
            "because no image is used on this machine"
        )
    _check_values(where, container)
    if job.servers is not None:
        check_servers(job.servers)


def check_servers(servers: ServerSpec, libraries: Sequence[str] = SERVER_LIBRARIES) -> None:
    """Check that servers can run on this machine. Nothing is started.

    Args:
        servers: The role ``ps`` of a job.
        libraries: The libraries that they need.

    Raises:
        ConfigError: A library is missing, or a place or a value is not for this machine.
    """
    lacking = [name for name in libraries if find_spec(name) is None]
    if lacking:
        raise ConfigError(
            f"{SERVERS}: needs {', '.join(lacking)}, not installed here: install DLRover-Py with "
            "its extra ps"
        )
    _check_values(f"{SERVERS}.template.spec.containers[main]", servers.container())
    if servers.checkpoints is not None and address(servers.checkpoints) != servers.checkpoints:
        raise ConfigError(
            f"{SERVERS}.checkpoints: found {servers.checkpoints[:100]!r}, expected "
            f"{address(servers.checkpoints)!r}, an absolute path, or the address of a bucket: the "
            "servers and the master run in different folders"
        )


def _check_values(where: str, container: Container) -> None:
    """Raise ConfigError for a variable whose value only Kubernetes has; otherwise do nothing."""
    for variable in container.env:
        if variable.value_from is not None:
            raise ConfigError(
                f"{where}.env: {variable.name} has valueFrom, which works on Kubernetes only: "
                "expected a value"
            )


def _check_deadline(job: ElasticJob) -> None:
    """Raise ConfigError if the deadline of the job's size has passed; otherwise do nothing."""
    scaling = job.worker.scaling
    ends_at = scaling.ends_at if scaling is not None else None
    if scaling is not None and ends_at is not None and ends_at <= time.time():  # noqa: TID251
        raise ConfigError(
            f"spec.replicaSpecs.worker.autoscale.deadline: found {scaling.deadline}, which has "
            "passed: expected a time in the future"
        )


def _check_images(job: ElasticJob) -> None:
    """Raise ConfigError for a job for a cluster whose containers have no image; else do nothing."""
    templates = [(TEMPLATE, job.worker.template)]
    if job.servers is not None:
        templates.append((SERVER_TEMPLATE, job.servers.template or {}))
    missing = [
        f"{path}.spec.{name}[{index}].image: missing: expected the name of an image"
        for path, template in templates
        for name in ("containers", "initContainers")
        for index, container in enumerate(template["spec"].get(name) or ())
        if not container.get("image")
    ]
    if missing:
        raise ConfigError("\n".join(missing))


def _line_of(node: yaml.Node | None, path: str) -> int:
    """Return the line of the deepest node on a path such as ``spec.a.b[0]``. Lines count from 1.

    If the document lacks the rest of the path, it is the line of the last part that exists.
    """
    line = 1 if node is None else node.start_mark.line + 1
    for part in path.replace("[", ".[").split("."):
        found: yaml.Node | None = None
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == part:
                    found, line = value, key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and part.startswith("["):
            index = part[1:-1]
            if index.isdigit() and int(index) < len(node.value):
                found = node.value[int(index)]
                line = found.start_mark.line + 1
        if found is None:
            return line
        node = found
    return line
