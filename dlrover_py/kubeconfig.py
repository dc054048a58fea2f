"""Kubeconfig files as kubectl reads them, and the proxy that kubectl would use.

Several files are merged as in client-go's ``tools/clientcmd`` (v0.34): of each name the first
entry counts, whole, and so does the first ``current-context``. Missing and empty files are left
out. Paths are relative to the file that they stand in.
"""

import asyncio
import base64
import ipaddress
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from dlrover_py.jsonyaml import Loader
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job import explain

EXEC_EXTENSION: Final = "client.authentication.k8s.io/exec"
"""Name of a cluster's extension that its users' plugins get."""


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True, frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any, info: Any) -> Any:
        if value is None:
            return cls.model_fields[info.field_name].get_default(call_default_factory=True)
        return value


_PartT = TypeVar("_PartT", bound=_Part)


class Variable(_Part):
    """A variable that a plugin gets beside the environment."""

    name: str = ""
    value: str = ""


class Exec(_Part):
    """A plugin that says who the user is."""

    api_version: str = Field(default="", alias="apiVersion")
    command: str = ""
    args: list[str] = []
    env: list[Variable] = []
    interactive: str = Field(default="IfAvailable", alias="interactiveMode")
    hint: str = Field(default="", alias="installHint")
    wants_cluster: bool = Field(default=False, alias="provideClusterInfo")


class User(_Part):
    """Who the user is, and as whom the user acts."""

    token: str = ""
    token_file: str = Field(default="", alias="tokenFile")
    cert_file: str = Field(default="", alias="client-certificate")
    cert_data: str = Field(default="", alias="client-certificate-data")
    key_file: str = Field(default="", alias="client-key")
    key_data: str = Field(default="", alias="client-key-data")
    username: str = ""
    password: str = ""
    exec: Exec | None = None
    auth_provider: dict[str, Any] | None = Field(default=None, alias="auth-provider")
    acts_as: str = Field(default="", alias="as")
    as_uid: str = Field(default="", alias="as-uid")
    as_groups: list[str] = Field(default=[], alias="as-groups")
    as_extra: dict[str, list[str]] = Field(default={}, alias="as-user-extra")

    def headers(self) -> Iterator[tuple[str, str]]:
        """What each request says of as whom the user acts.

        Raises:
            ConfigError: groups and the like need a user.
        """
        if not self.acts_as and (self.as_uid or self.as_groups or self.as_extra):
            raise ConfigError("as-uid, as-groups and as-user-extra need as: expected a user's name")
        if self.acts_as:
            yield "Impersonate-User", self.acts_as
        if self.as_uid:
            yield "Impersonate-Uid", self.as_uid
        for group in self.as_groups:
            yield "Impersonate-Group", group
        for key, values in self.as_extra.items():
            for value in values:
                yield f"Impersonate-Extra-{_escaped(key)}", value


class Cluster(_Part):
    """Where an API server is, and how it is known."""

    server: str = ""
    tls_server_name: str = Field(default="", alias="tls-server-name")
    insecure: bool = Field(default=False, alias="insecure-skip-tls-verify")
    ca_file: str = Field(default="", alias="certificate-authority")
    ca_data: str = Field(default="", alias="certificate-authority-data")
    proxy_url: str = Field(default="", alias="proxy-url")
    disable_compression: bool = Field(default=False, alias="disable-compression")
    extensions: list[dict[str, Any]] = []

    def authority(self) -> bytes:
        """The certificates that the server's has to be signed by, as PEM; empty if none is named.

        Raises:
            OSError: the file cannot be read.
            ValueError: the data are no base64.
        """
        return _bytes(self.ca_file, self.ca_data)


class Context(_Part):
    """A user of a cluster, and a namespace."""

    cluster: str = ""
    user: str = ""
    namespace: str = ""


class _NamedCluster(_Part):
    name: str = ""
    part: Cluster = Field(default=Cluster(), alias="cluster")


class _NamedUser(_Part):
    name: str = ""
    part: User = Field(default=User(), alias="user")


class _NamedContext(_Part):
    name: str = ""
    part: Context = Field(default=Context(), alias="context")


class _File(_Part):
    kind: str = ""
    api_version: str = Field(default="", alias="apiVersion")
    clusters: list[_NamedCluster] = []
    users: list[_NamedUser] = []
    contexts: list[_NamedContext] = []
    current: str = Field(default="", alias="current-context")

    @field_validator("clusters", "users", "contexts", mode="before")
    @classmethod
    def _null_is_empty(cls, value: Any) -> Any:
        return [{} if v is None else v for v in value] if isinstance(value, list) else value


class Config(NamedTuple):
    """What all files say together."""

    clusters: dict[str, Cluster]
    users: dict[str, User]
    contexts: dict[str, Context]
    current: str

    def choose(self, context: str | None) -> tuple[Context, Cluster, User]:
        """Find the entries of a context, or of the current one.

        Raises:
            ConfigError: there is no such context, cluster or user.
        """
        name = context or self.current
        if not name:
            raise ConfigError("it names no context: set current-context, or give --context")
        known = ", ".join(sorted(self.contexts)) or "none"
        if name not in self.contexts:
            raise ConfigError(f"there is no context {name!r}: expected one of: {known}")
        found = self.contexts[name]
        if found.cluster not in self.clusters:
            raise ConfigError(f"context {name!r}: there is no cluster {found.cluster!r}")
        if found.user and found.user not in self.users:
            raise ConfigError(f"context {name!r}: there is no user {found.user!r}")
        return found, self.clusters[found.cluster], self.users.get(found.user, User())


def read(paths: Iterable[str]) -> Config:
    """Merge files; those that are missing or empty are left out.

    Raises:
        ConfigError: one cannot be read, or is no kubeconfig.
    """
    merged = Config({}, {}, {}, "")
    for path in dict.fromkeys(p for p in paths if p):
        try:
            text = Path(path).read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(f"{path}: {why}") from error
        merged = _merged(merged, _parsed(path, text), Path(path).absolute().parent)
    return merged


def _parsed(path: str, text: str) -> _File:
    try:
        document = next(yaml.load_all(text, Loader=Loader), None)
        found = _File.model_validate({} if document is None else document)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, ValidationError):
            words = f"{explain(error)}; expected a kubeconfig (clusters, users, contexts) as YAML"
        else:
            words = str(error)
        raise ConfigError(f"{path}: {words}") from error
    if found.kind not in ("", "Config") or found.api_version not in ("", "v1"):
        said = f"{found.kind or 'Config'} of {found.api_version or 'v1'}"
        raise ConfigError(f"{path}: found kind {said}: expected Config of v1")
    for kind in ("clusters", "users", "contexts"):
        names = [item.name for item in getattr(found, kind)]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"{path}: {kind}: the name {twice!r} stands twice")
    return found


def _merged(first: Config, file: _File, folder: Path) -> Config:
    """What stood before counts."""
    clusters = {n.name: _resolved(n.part, folder, "ca_file") for n in file.clusters}
    users = {
        n.name: _resolved(n.part, folder, "cert_file", "key_file", "token_file") for n in file.users
    }
    for name, user in users.items():
        # A name without a slash is looked for in PATH.
        if user.exec is not None and "/" in user.exec.command:
            command = str(folder / user.exec.command)
            plugin = user.exec.model_copy(update={"command": command})
            users[name] = user.model_copy(update={"exec": plugin})
    contexts = {n.name: n.part for n in file.contexts}
    return Config(
        clusters | first.clusters,
        users | first.users,
        contexts | first.contexts,
        first.current or file.current,
    )


def _resolved(part: _PartT, folder: Path, *fields: str) -> _PartT:
    paths = {field: str(folder / getattr(part, field)) for field in fields if getattr(part, field)}
    return part.model_copy(update=paths)


def _escaped(key: str) -> str:
    """A part of a header's name, with ``%`` codes as in RFC 3986."""
    plain = frozenset(
        b"!#$&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    )
    return "".join(chr(b) if b in plain else f"%{b:02X}" for b in key.encode())


# --- who the user is ---

BASIC, BEARER = "Basic", "Bearer"


class Credentials(NamedTuple):
    """What a server knows a user by; each may be empty."""

    authorization: str = ""
    cert: bytes = b""
    key: bytes = b""
    good_until: datetime = datetime.max.replace(tzinfo=UTC)


def check(cluster: Cluster, user: User) -> None:
    """Refuse what kubectl refuses.

    Raises:
        ConfigError: fields that exclude each other, or that are missing.
    """
    both = [
        (cluster.ca_file and cluster.ca_data, "certificate-authority and its -data"),
        (cluster.insecure and (cluster.ca_file or cluster.ca_data), _INSECURE),
        (user.cert_file and user.cert_data, "client-certificate and its -data"),
        (user.key_file and user.key_data, "client-key and its -data"),
        (user.token and user.username, "token and username"),
        (user.exec and user.auth_provider, "exec and auth-provider"),
    ]
    for found, words in both:
        if found:
            raise ConfigError(f"{words} exclude each other: keep one of the two")
    if not cluster.server:
        raise ConfigError("the cluster has no server: expected https://host:port")
    if (user.cert_file or user.cert_data) and not (user.key_file or user.key_data):
        raise ConfigError("client-certificate needs a client-key")
    if user.exec is not None and not (user.exec.command and user.exec.api_version):
        raise ConfigError("exec: expected command and apiVersion")
    for name, value in user.headers():
        if not f"{name}{value}".isprintable():
            raise ConfigError(f"{name}: found {value!r}: expected printable text")


_NEVER = "9999-12-31T23:59:59Z"
_INSECURE = "insecure-skip-tls-verify and certificate-authority"


def known(user: User) -> Credentials | None:
    """Return what the entry itself and its files say; None if a plugin has to be asked.

    Raises:
        OSError: a file cannot be read.
        ValueError: data are no base64.
    """
    cert, key = _bytes(user.cert_file, user.cert_data), _bytes(user.key_file, user.key_data)
    token = user.token
    if user.token_file:  # the file is read again and again, and counts
        try:
            token = Path(user.token_file).read_text().strip() or token
        except OSError:
            if not token:
                raise
    if token:
        return Credentials(f"{BEARER} {token}", cert, key)
    if user.username:
        pair = base64.b64encode(f"{user.username}:{user.password}".encode()).decode()
        return Credentials(f"{BASIC} {pair}", cert, key)
    if cert or (user.exec is None and user.auth_provider is None):
        return Credentials("", cert, key)
    return None


def _bytes(file: str, data: str) -> bytes:
    return base64.b64decode(data) if data else Path(file).read_bytes() if file else b""


async def ask(
    plugin: Exec, cluster: Cluster, proxy: str, environ: Mapping[str, str]
) -> Credentials:
    """Run a plugin (``client.authentication.k8s.io``).

    Args:
        plugin: which one, and how.
        cluster: which cluster the credentials are for.
        proxy: through which proxy that is called; empty for none.
        environ: what the plugin has beside its own variables.

    Raises:
        ConfigError: it cannot be started, fails, or says nothing that can be used.
    """
    talks = plugin.interactive != "Never" and sys.stdin is not None and sys.stdin.isatty()
    if plugin.interactive == "Always" and not talks:
        raise ConfigError(f"plugin {plugin.command!r}: it needs a terminal (interactiveMode)")
    spec: dict[str, Any] = {"interactive": talks}
    if plugin.wants_cluster:
        spec["cluster"] = _told(cluster, proxy)
    info = {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": spec}
    more = {v.name: v.value for v in plugin.env} | {"KUBERNETES_EXEC_INFO": json.dumps(info)}
    try:
        process = await asyncio.create_subprocess_exec(
            *(plugin.command, *plugin.args),
            env={**environ, **more},
            stdin=None if talks else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=None if talks else asyncio.subprocess.PIPE,
        )
    except OSError as error:
        hint = f"; {plugin.hint}" if plugin.hint else ""
        raise ConfigError(f"plugin {plugin.command!r}: {error.strerror}{hint}") from error
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        said = (err or b"").decode("utf-8", "replace").strip()
        code = f"it ended with code {process.returncode}"
        raise ConfigError(f"plugin {plugin.command!r}: {code}{f': {said}' if said else ''}")
    try:
        return _answer(plugin, json.loads(out))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        words = f"expected an ExecCredential of {plugin.api_version} as JSON"
        raise ConfigError(f"plugin {plugin.command!r}: {words}, found {out[:60]!r}") from error


def _told(cluster: Cluster, proxy: str) -> dict[str, Any]:
    """What a plugin learns of the cluster."""
    configs = [e.get("extension") for e in cluster.extensions if e.get("name") == EXEC_EXTENSION]
    told: dict[str, Any] = {
        "server": cluster.server,
        "tls-server-name": cluster.tls_server_name,
        "insecure-skip-tls-verify": cluster.insecure,
        "certificate-authority-data": base64.b64encode(cluster.authority()).decode(),
        "proxy-url": proxy,
        "disable-compression": cluster.disable_compression,
    }
    told = {key: value for key, value in told.items() if value}
    return told | {"config": configs[0] if configs else None}


def _answer(plugin: Exec, said: dict[str, Any]) -> Credentials:
    if said["apiVersion"] != plugin.api_version or said["kind"] != "ExecCredential":
        raise ValueError("of another version")
    status = said["status"]
    token, cert, key = (
        str(status.get(name) or "") for name in ("token", "clientCertificateData", "clientKeyData")
    )
    if bool(cert) != bool(key) or not (token or cert):
        raise ConfigError(f"plugin {plugin.command!r}: it gave neither token nor key")
    until = datetime.fromisoformat(status.get("expirationTimestamp") or _NEVER)
    return Credentials(
        f"{BEARER} {token}" if token else "",
        cert.encode(),
        key.encode(),
        until if until.tzinfo else until.replace(tzinfo=UTC),
    )


# --- proxies ---


def environments_proxy(server: str, environ: Mapping[str, str]) -> str:
    """The proxy for a server, by the variables and rules of Go's ``httpproxy``; empty for none.

    Args:
        server: URL of the API server.
        environ: HTTPS_PROXY, HTTP_PROXY and NO_PROXY, or the same in small letters.
    """
    parts = urlsplit(server)
    proxy = _variable(environ, f"{parts.scheme.upper()}_PROXY")
    port = str(parts.port or (443 if parts.scheme == "https" else 80))
    if not proxy or _goes_direct(parts.hostname or "", port, _variable(environ, "NO_PROXY")):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def _variable(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name) or environ.get(name.lower()) or ""


def _goes_direct(host: str, port: str, exceptions: str) -> bool:
    address = _address(host)
    if host == "localhost" or (address is not None and address.is_loopback):
        return True
    for word in exceptions.lower().split(","):
        rule = word.strip()
        if rule == "*":
            return True
        if rule and _excepts(rule, host, port, address):
            return True
    return False


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _excepts(rule: str, host: str, port: str, address: _Address | None) -> bool:
    if "/" in rule:
        try:
            return address is not None and address in ipaddress.ip_network(rule, strict=False)
        except ValueError:
            return False
    name, only = rule, ""
    if rule.count(":") == 1 or "]:" in rule:
        name, _, only = rule.rpartition(":")
        name = name.strip("[]")
    if not name or only not in ("", port):
        return False
    if (excepted := _address(name)) is not None:
        return excepted == address
    if address is not None:
        return False
    name = name[1:] if name.startswith("*.") else name
    return (
        host.endswith(name) if name.startswith(".") else host == name or host.endswith(f".{name}")
    )


def _address(text: str) -> _Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def files(environ: Mapping[str, str]) -> list[str]:
    """The files that count where none is given: ``KUBECONFIG``, else the one of the home folder."""
    named = environ.get("KUBECONFIG", "")
    home = environ.get("HOME") or os.path.expanduser("~")
    return named.split(os.pathsep) if named else [f"{home}/.kube/config"]
