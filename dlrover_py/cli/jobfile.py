"""Reads a job file, and says where in it a fault stands."""

from pathlib import Path

import yaml

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job import ElasticJob


def load(path: Path) -> ElasticJob:
    """Read and check a job file that is to be run on this machine.

    Raises:
        ConfigError: one line for each fault: ``file:line: path: found, expected``.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path}: {why}") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        what = getattr(error, "problem", None) or "cannot be read"
        raise ConfigError(f"{where}: not valid YAML: {what}") from error
    except (ValueError, RecursionError) as error:  # a date that is none; nested without end
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    try:
        job = ElasticJob.parse(document)
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
        return job
    except ConfigError as error:
        lines = [
            f"{path}:{_line_of(root, line.partition(': ')[0])}: {line}"
            for line in str(error).splitlines()
        ]
        raise ConfigError("\n".join(lines)) from error


def _line_of(node: yaml.Node | None, path: str) -> int:
    """Line of the deepest node on a path such as ``spec.a.b[0]``, from 1."""
    line = 1
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
