"""Reads a job file, and says where in it a fault stands."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dlrover_py.jsonyaml import Loader, fault
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job import ElasticJob


@dataclass(frozen=True, slots=True)
class Document:
    """One job of a file, as it is written and as it is understood."""

    written: dict[str, Any]
    job: ElasticJob
    remarks: tuple[str, ...]
    """Fields of its templates that are not known here: ``file:line: path: what to do``."""


def load(path: Path) -> Document:
    """Read and check a job file that is to be run on this machine.

    Raises:
        ConfigError: one line for each fault: ``file:line: path: found, expected``.
    """
    name, text = str(path), _text(path)
    parsed = _parsed(name, text)
    root, document = parsed[0]
    with _lines_of(name, parsed[-1][0]):
        if len(parsed) > 1:
            raise ConfigError(f"found {len(parsed)} documents; on this machine a file has one job")
    with _lines_of(name, root):
        job = ElasticJob.parse(document)
        _check_for_here(job)
    return Document(document, job, _remarks(name, root, job))


def load_all(path: Path) -> list[Document]:
    """Read and check all jobs of a file, or of standard input (``-``), for a cluster.

    Raises:
        ConfigError: one line for each fault: ``file:line: path: found, expected``.
    """
    name = "standard input" if str(path) == "-" else str(path)
    text = sys.stdin.read() if str(path) == "-" else _text(path)
    found, faults = [], []
    for root, document in _parsed(name, text):
        try:
            with _lines_of(name, root):
                job = ElasticJob.parse(document)
            found.append(Document(document, job, _remarks(name, root, job)))
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError("\n".join(faults))
    return found


class _Loader(Loader):
    """Refuses a key that stands twice in a mapping, where YAML's last one would count."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Check the keys before merges (``<<``) bring in others."""
        node = super().compose_mapping_node(anchor)
        first: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            if key.value in first:
                words = f"the key {key.value!r} stands twice, first on line {first[key.value]}"
                raise fault(f"{words}: keep one of the two", key)
            first[key.value] = line
        return node


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path}: {why}") from error


def _parsed(name: str, text: str) -> list[tuple[yaml.Node | None, Any]]:
    """Each document as a tree that knows its lines and as plain data; one at least."""
    try:
        roots = list(yaml.compose_all(text, Loader=_Loader))
        documents = list(yaml.load_all(text, Loader=_Loader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark is not None else name
        what = getattr(error, "problem", None) or "cannot be read"
        raise ConfigError(f"{where}: not valid YAML: {what}") from error
    except (ValueError, RecursionError) as error:  # a date that is none; nested without end
        raise ConfigError(f"{name}: not valid YAML: {error}") from error
    pairs: list[tuple[yaml.Node | None, Any]] = [
        (r, d) for r, d in zip(roots, documents, strict=True) if d is not None
    ]
    return pairs or [(None, None)]


@contextlib.contextmanager
def _lines_of(name: str, root: yaml.Node | None) -> Iterator[None]:
    """Say of each fault on which line of the file it stands."""
    try:
        yield
    except ConfigError as error:
        lines = [
            f"{name}:{_line_of(root, line.partition(': ')[0])}: {line}"
            for line in str(error).splitlines()
        ]
        raise ConfigError("\n".join(lines)) from error


def _remarks(name: str, root: yaml.Node | None, job: ElasticJob) -> tuple[str, ...]:
    unknown = [fault for fault in job.template_faults() if fault.unknown]
    return tuple(f"{name}:{_line_of(root, fault.path)}: {fault}" for fault in unknown)


def _check_for_here(job: ElasticJob) -> None:
    where = "spec.replicaSpecs.worker.template.spec.containers[main]"
    container = job.worker.container()
    if not container.command:
        raise ConfigError(
            f"{where}.command: missing; on this machine there is no image that could bring "
            "one, such as [elastic-run, train.py]"
        )
    for variable in container.env:
        if variable.value_from is not None:
            raise ConfigError(
                f"{where}.env: {variable.name} has valueFrom; on this machine there is nothing "
                "to take it from: give it a value"
            )


def _line_of(node: yaml.Node | None, path: str) -> int:
    """Line of the deepest node on a path such as ``spec.a.b[0]``, from 1."""
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
