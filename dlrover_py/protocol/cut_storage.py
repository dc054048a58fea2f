"""What a master's Pod takes from the servers' template to reach the directory of their cuts.

Servers write the files of a cut, and the master writes its manifest. So both need the same volume,
or the same credentials of a bucket. A job names them once, in the template of the role ``ps``.
"""

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from dlrover_py.protocol.errors import ConfigError, shown

STORE_ENV: Final = ("AWS_", "AZURE_", "GOOGLE_", "GCS_")
"""Beginnings of the variables that clients of buckets read."""
OWN_FOLDERS: Final = ("/tmp", "/var/run/dlrover", "/var/run/secrets", "/run")
"""Folders in which a master's Pod has mounts of its own."""
UNSHARED: Final = (
    "emptyDir", "ephemeral", "configMap", "secret", "projected", "downwardAPI", "gitRepo", "image",
)  # fmt: skip
"""Kinds of volumes that each Pod has for itself, or may not write."""
OPTIONAL: Final = ("secretKeyRef", "configMapKeyRef")
"""Sources of a variable that may be missing, if the Pod says so."""
IDENTITY: Final = ("runAsUser", "runAsGroup")
"""Fields of a security context that decide as whom a program writes files."""
GROUPS: Final = ("fsGroup", "fsGroupChangePolicy", "supplementalGroups", "seLinuxOptions")
"""Fields of a Pod's security context that decide which volumes it may write."""


@dataclass(frozen=True, slots=True)
class CutStorage:
    """Fields of the master's Pod and container. All are empty for a bucket without credentials."""

    volumes: tuple[dict[str, Any], ...] = ()
    """The volume with the directory."""
    mounts: tuple[dict[str, Any], ...] = ()
    """Where the volume is mounted, as in the servers' container."""
    env: tuple[dict[str, Any], ...] = ()
    """The variables of a bucket's client."""
    security: dict[str, Any] | None = None
    """Fields of the Pod's security context, so that the master may write where the servers may."""

    @classmethod
    def of(cls, url: str, pod: dict[str, Any], container: dict[str, Any]) -> "CutStorage":
        """Return what the master needs.

        Args:
            url: Directory or address of a bucket, for the cuts.
            pod: The ``spec`` of the servers' Pod template.
            container: The container in it that runs the server.

        Raises:
            ConfigError: The directory is not in a volume that the servers and the master share.
        """
        security = _security(pod, container)
        if "://" in url:
            return cls(env=tuple(store_env(container)), security=security)
        if not url.startswith("/") or posixpath.normpath(url) != url:
            raise ConfigError(
                f"found {shown(url)}: expected an absolute path without '..', or the address of a "
                "bucket such as s3://bucket/cuts"
            )
        mount = max(
            (one for one in _objects(container.get("volumeMounts")) if _holds(one, url)),
            key=lambda one: len(_path(one)),
            default=None,
        )
        if mount is None:
            raise ConfigError(
                f"found {shown(url)}, which is in no volume of the servers: expected a directory "
                "in a volumeMount of the template of the role ps, as servers and master share it"
            )
        name, path = mount.get("name"), _path(mount)
        where = f"found {shown(url)}, in the volume {name!r}"
        volume = next((v for v in _objects(pod.get("volumes")) if v.get("name") == name), None)
        kind = next((kind for kind in UNSHARED if volume is not None and kind in volume), None)
        if volume is None or kind is not None:
            found = "there is no such volume" if volume is None else f"its kind is {kind}"
            raise ConfigError(
                f"{where}: {found}; expected a volume that all hosts share, such as a "
                "persistentVolumeClaim with ReadWriteMany, or nfs"
            )
        if mount.get("readOnly") or mount.get("subPathExpr"):
            field = "readOnly" if mount.get("readOnly") else "subPathExpr"
            raise ConfigError(f"{where}: its volumeMount has {field}: expected one without it")
        if any(path == own or path.startswith(f"{own}/") for own in OWN_FOLDERS):
            raise ConfigError(
                f"{where}: the master has a volume of its own at {path}: expected another mountPath"
            )
        own = "cuts"
        return cls(({**volume, "name": own},), ({**mount, "name": own},), security=security)


def store_env(container: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the variables of a container that clients of buckets read."""
    return [one for one in _objects(container.get("env")) if _is_for_stores(one)]


def optional_env(variables: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those of a container's variables with which any Pod starts, also without them.

    A Secret or ConfigMap may be missing. Other sources of a value are left out: they belong to the
    container, or name it.
    """
    found = []
    for one in variables:
        source = one.get("valueFrom")
        if source is None:
            found.append(one)
        elif isinstance(source, dict):
            refs = {kind: source[kind] for kind in OPTIONAL if isinstance(source.get(kind), dict)}
            kept = {kind: {**ref, "optional": True} for kind, ref in refs.items()}
            found += [{**one, "valueFrom": kept}] if kept else []
    return found


def _security(pod: dict[str, Any], container: dict[str, Any]) -> dict[str, Any]:
    """Return the security context with which files of the servers can be written and removed.

    A server that runs as root needs none: it may write everywhere, and the master does not run as
    root.
    """
    of_pod, of_main = pod.get("securityContext"), container.get("securityContext")
    of_pod = of_pod if isinstance(of_pod, dict) else {}
    both = of_pod | (of_main if isinstance(of_main, dict) else {})
    found = {name: of_pod[name] for name in GROUPS if of_pod.get(name) is not None}
    if both.get("runAsUser"):
        found |= {name: both[name] for name in IDENTITY if both.get(name) is not None}
    return found


def _holds(mount: dict[str, Any], path: str) -> bool:
    at = _path(mount)
    return bool(at) and (path == at or path.startswith(f"{at.rstrip('/')}/"))


def _path(mount: dict[str, Any]) -> str:
    found = mount.get("mountPath")
    return posixpath.normpath(found) if isinstance(found, str) and found.startswith("/") else ""


def _is_for_stores(variable: dict[str, Any]) -> bool:
    return str(variable.get("name", "")).upper().startswith(STORE_ENV)


def _objects(found: object) -> Iterator[dict[str, Any]]:
    for one in found if isinstance(found, list) else ():
        if isinstance(one, dict):
            yield one
