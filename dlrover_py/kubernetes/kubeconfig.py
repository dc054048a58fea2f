"""A reader of kubeconfig files that follows kubectl, and of the proxy that kubectl would use.

Several files are merged as in client-go's ``tools/clientcmd`` (v0.34). The first entry of a name
counts as a whole, and so does the first ``current-context``. Missing and empty files are left out.
Paths in a file are relative to the folder of that file.
"""

import base64
import contextlib
import ipaddress
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from dlrover_py.kubernetes.json_yaml import Loader
from dlrover_py.process.blocking import inheritable_signals, read_at_most, read_regular
from dlrover_py.process.children import end
from dlrover_py.protocol import json_text
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job import explain
from dlrover_py.protocol.words import counted

MAX_BYTES: Final = 1 << 24
"""Largest size, in bytes, of a kubeconfig, of a file that it names, and of a plugin's output."""
EXEC_EXTENSION: Final = "client.authentication.k8s.io/exec"
"""Name of the cluster extension that is passed to the plugins of the cluster's users."""


class _Part(BaseModel):
    """The base class of the parts of a kubeconfig.

    Unknown fields are ignored, and null means absent.
    """

    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True, frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any, info: Any) -> Any:
        """Replace null by the default of the field."""
        if value is None:
            return cls.model_fields[info.field_name].get_default(call_default_factory=True)
        return value


_PartT = TypeVar("_PartT", bound=_Part)


class Variable(_Part):
    """An environment variable for a plugin, in addition to the environment of this process."""

    name: str = ""
    value: str = ""


class Exec(_Part):
    """A plugin that returns credentials."""

    api_version: str = Field(default="", alias="apiVersion")
    command: str = ""
    args: list[str] = []
    env: list[Variable] = []
    interactive: str = Field(default="IfAvailable", alias="interactiveMode")
    hint: str = Field(default="", alias="installHint")
    wants_cluster: bool = Field(default=False, alias="provideClusterInfo")


class User(_Part):
    """The credentials of a user, and the user that it impersonates."""

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
        """Yield the headers that impersonate another user, for each request.

        There are none if the entry names no user to impersonate.

        Raises:
            ConfigError: a uid, groups or extra fields are given without the name of a user.
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


class ClusterEntry(_Part):
    """The address of an API server, and how its certificate is checked."""

    server: str = ""
    tls_server_name: str = Field(default="", alias="tls-server-name")
    insecure: bool = Field(default=False, alias="insecure-skip-tls-verify")
    ca_file: str = Field(default="", alias="certificate-authority")
    ca_data: str = Field(default="", alias="certificate-authority-data")
    proxy_url: str = Field(default="", alias="proxy-url")
    disable_compression: bool = Field(default=False, alias="disable-compression")
    extensions: list[dict[str, Any]] = []

    def authority(self) -> bytes:
        """Return the authority's certificates as PEM; empty if none is named.

        One of them must have signed the server's certificate.

        Raises:
            OSError: the file cannot be read.
            ValueError: the data is not base64.
        """
        return _bytes(self.ca_file, self.ca_data)


class Context(_Part):
    """A cluster, a user of it, and a namespace."""

    cluster: str = ""
    user: str = ""
    namespace: str = ""


class _NamedCluster(_Part):
    """An entry of ``clusters`` in a kubeconfig."""

    name: str = ""
    part: ClusterEntry = Field(default=ClusterEntry(), alias="cluster")


class _NamedUser(_Part):
    """An entry of ``users`` in a kubeconfig."""

    name: str = ""
    part: User = Field(default=User(), alias="user")


class _NamedContext(_Part):
    """An entry of ``contexts`` in a kubeconfig."""

    name: str = ""
    part: Context = Field(default=Context(), alias="context")


class _KubeconfigFile(_Part):
    """The content of one kubeconfig file."""

    kind: str = ""
    api_version: str = Field(default="", alias="apiVersion")
    clusters: list[_NamedCluster] = []
    users: list[_NamedUser] = []
    contexts: list[_NamedContext] = []
    current: str = Field(default="", alias="current-context")

    @field_validator("clusters", "users", "contexts", mode="before")
    @classmethod
    def _null_is_empty(cls, value: Any) -> Any:
        """Replace each null entry by an empty one."""
        return [{} if v is None else v for v in value] if isinstance(value, list) else value


class KubeConfig(NamedTuple):
    """The merged content of all files."""

    clusters: dict[str, ClusterEntry]
    users: dict[str, User]
    contexts: dict[str, Context]
    current: str

    def choose(self, context: str | None) -> tuple[Context, ClusterEntry, User]:
        """Return the entries of a context, or of the current context.

        A context without a user gives an empty user, which has no credentials.

        Raises:
            ConfigError: no context is named, or there is no such context, cluster or user.
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


def read(paths: Iterable[str]) -> KubeConfig:
    """Merge kubeconfig files. Missing and empty files are left out.

    Without any file the result is empty. The entries are not checked yet: see :func:`check`.

    Raises:
        ConfigError: a file cannot be read, or is not a kubeconfig.
    """
    merged = KubeConfig({}, {}, {}, "")
    for path in dict.fromkeys(p for p in paths if p):
        try:
            with open(path, "rb") as file:  # it may be a pipe; kubectl reads pipes, too
                data = read_at_most(file, MAX_BYTES)
            if data is None:
                raise ConfigError(f"{path}: it has more than {MAX_BYTES} bytes")
            text = data.decode()
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(f"{path}: {why}") from error
        merged = _merged(merged, _parsed(path, text), Path(path).absolute().parent)
    return merged


def _parsed(path: str, text: str) -> _KubeconfigFile:
    """Parse and check one file. Only its first YAML document counts; an empty file has no entries.

    Raises:
        ConfigError: the file is not a kubeconfig, or names an entry twice.
    """
    try:
        document = next(yaml.load_all(text, Loader=Loader), None)
        found = _KubeconfigFile.model_validate({} if document is None else document)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, ValidationError):
            message = f"{explain(error)}; expected a kubeconfig (clusters, users, contexts) as YAML"
        else:
            message = str(error)
        raise ConfigError(f"{path}: {message}") from error
    if found.kind not in ("", "Config") or found.api_version not in ("", "v1"):
        kind = f"{found.kind or 'Config'} of {found.api_version or 'v1'}"
        raise ConfigError(f"{path}: found kind {kind}: expected Config of v1")
    for kind in ("clusters", "users", "contexts"):
        names = [item.name for item in getattr(found, kind)]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"{path}: {kind}: the name {twice!r} appears twice")
    return found


def _merged(first: KubeConfig, file: _KubeconfigFile, folder: Path) -> KubeConfig:
    """Return the merge of a file into the files before it. The entries of the earlier files count.

    Paths of the file become absolute, by its folder. A plugin's command without a slash stays,
    because it is searched for in PATH.
    """
    clusters = {n.name: _resolved(n.part, folder, "ca_file") for n in file.clusters}
    users = {
        n.name: _resolved(n.part, folder, "cert_file", "key_file", "token_file") for n in file.users
    }
    for name, user in users.items():
        # A command without a slash is searched for in PATH.
        if user.exec is not None and "/" in user.exec.command:
            command = str(folder / user.exec.command)
            plugin = user.exec.model_copy(update={"command": command})
            users[name] = user.model_copy(update={"exec": plugin})
    contexts = {n.name: n.part for n in file.contexts}
    return KubeConfig(
        clusters | first.clusters,
        users | first.users,
        contexts | first.contexts,
        first.current or file.current,
    )


def _resolved(part: _PartT, folder: Path, *fields: str) -> _PartT:
    """Return a part whose paths are resolved against the folder of its file."""
    paths = {field: str(folder / getattr(part, field)) for field in fields if getattr(part, field)}
    return part.model_copy(update=paths)


def _escaped(key: str) -> str:
    """Encode a part of a header's name with ``%`` codes (RFC 3986)."""
    plain = frozenset(
        b"!#$&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    )
    return "".join(chr(b) if b in plain else f"%{b:02X}" for b in key.encode())


# --- Credentials ---

BASIC, BEARER = "Basic", "Bearer"


class UserCredentials(NamedTuple):
    """The credentials of a user. Each field may be empty."""

    authorization: str = ""
    """Value of the ``Authorization`` header."""
    cert: bytes = b""
    """Client certificate as PEM."""
    key: bytes = b""
    """Key of the client certificate as PEM."""
    expires_at: datetime = datetime.max.replace(tzinfo=UTC)
    """Expiry. The default is the latest time that Python has."""


def check(cluster: ClusterEntry, user: User) -> None:
    """Refuse what kubectl refuses. No file is read.

    Raises:
        ConfigError: fields exclude each other, or a field is missing.
    """
    both = [
        (cluster.ca_file and cluster.ca_data, "certificate-authority and its -data"),
        (cluster.insecure and (cluster.ca_file or cluster.ca_data), _INSECURE),
        (user.cert_file and user.cert_data, "client-certificate and its -data"),
        (user.key_file and user.key_data, "client-key and its -data"),
        (user.token and user.username, "token and username"),
        (user.exec and user.auth_provider, "exec and auth-provider"),
    ]
    for found, message in both:
        if found:
            raise ConfigError(f"{message} exclude each other: keep one of the two")
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
"""Expiry of credentials that do not expire."""
_INSECURE = "insecure-skip-tls-verify and certificate-authority"


def known(user: User) -> UserCredentials | None:
    """Return the credentials of the entry itself and its files.

    A token comes before a user name with a password. A token file comes before the entry's token,
    which is used if the file is empty or cannot be read.

    Returns:
        The credentials; all fields are empty if the entry has none. None if the entry has no token,
        user name or certificate, but a plugin or an OpenID provider to ask.

    Raises:
        OSError: a file cannot be read.
        ValueError: data is not base64, or the token file is not UTF-8 text.
    """
    cert, key = _bytes(user.cert_file, user.cert_data), _bytes(user.key_file, user.key_data)
    token = user.token
    if user.token_file:  # the file is read each time, and has priority
        try:
            token = read_regular(user.token_file, MAX_BYTES).decode().strip() or token
        except OSError:
            if not token:
                raise
    if token:
        return UserCredentials(f"{BEARER} {token}", cert, key)
    if user.username:
        pair = base64.b64encode(f"{user.username}:{user.password}".encode()).decode()
        return UserCredentials(f"{BASIC} {pair}", cert, key)
    if cert or (user.exec is None and user.auth_provider is None):
        return UserCredentials("", cert, key)
    return None


def _bytes(file: str, data: str) -> bytes:
    """Decode the data of a field, or read the file that it names; empty if both are empty.

    Raises:
        OSError: The file cannot be read.
        ValueError: The data is no base64. Line breaks in it are allowed, as for kubectl.
    """
    if data:
        return base64.b64decode(data.replace("\r", "").replace("\n", ""), validate=True)
    return read_regular(file, MAX_BYTES) if file else b""


def ask(
    plugin: Exec,
    cluster: ClusterEntry,
    proxy: str,
    environ: Mapping[str, str],
    *,
    within_s: float,
    began: Callable[["subprocess.Popen[bytes]"], object],
) -> UserCredentials:
    """Run a plugin (``client.authentication.k8s.io``) and wait for its answer.

    The plugin may hang: call this function in a thread. If this process has a terminal, the plugin
    may use it, unless its ``interactiveMode`` is ``Never``. The plugin is always killed at the end.

    Args:
        plugin: the plugin, with its arguments.
        cluster: the cluster that the credentials are for.
        proxy: proxy through which the cluster is reached; empty for none.
        environ: environment of the plugin; the plugin's own variables replace those in it.
        within_s: seconds after which the plugin is killed.
        began: called with the process, which the caller may kill earlier.

    Raises:
        ConfigError: the plugin needs a terminal, cannot be started, fails, or returns nothing
            usable.
        TimeoutError: the plugin took too long and was killed.
        OSError: the cluster's authority, which the plugin wants, cannot be read.
    """
    talks = plugin.interactive != "Never" and sys.stdin is not None and sys.stdin.isatty()
    if plugin.interactive == "Always" and not talks:
        raise ConfigError(f"plugin {plugin.command!r}: it needs a terminal (interactiveMode)")
    spec: dict[str, Any] = {"interactive": talks}
    if plugin.wants_cluster:
        spec["cluster"] = _cluster_info(cluster, proxy)
    info = {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": spec}
    more = {v.name: v.value for v in plugin.env} | {"KUBERNETES_EXEC_INFO": json.dumps(info)}
    try:
        with inheritable_signals():
            process = subprocess.Popen(
                (plugin.command, *plugin.args),
                env={**environ, **more},
                stdin=None if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=None if talks else subprocess.PIPE,
            )
    except (OSError, ValueError) as error:
        hint = f"; {plugin.hint}" if plugin.hint else ""
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"plugin {plugin.command!r}: {why}{hint}") from error
    began(process)
    try:
        out, err = _read_output(plugin, process, time.monotonic() + within_s)
    finally:
        end(process, 0.0)
    if process.returncode:
        message = err.decode("utf-8", "replace").strip()
        code = f"it ended with code {process.returncode}"
        raise ConfigError(f"plugin {plugin.command!r}: {code}{f': {message}' if message else ''}")
    try:
        return _answer(plugin, json_text.decoded(out))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        # What it has written may be a token, in the document of another version.
        raise ConfigError(
            f"plugin {plugin.command!r}: expected an ExecCredential of {plugin.api_version} as "
            f"JSON, found {counted(len(out), 'byte')} of another form"
        ) from error


def _read_output(
    plugin: Exec, process: "subprocess.Popen[bytes]", until: float
) -> tuple[bytes, bytes]:
    """Return what a plugin writes to standard output and to standard error, once it has ended.

    Standard error is empty if the plugin writes it to the terminal.

    Args:
        plugin: the plugin, for messages.
        process: its process.
        until: deadline, by the monotonic clock in seconds.

    Raises:
        ConfigError: an output has more than ``MAX_BYTES`` bytes.
        TimeoutError: the deadline has passed. The plugin is not killed here.
    """
    pipes = [pipe for pipe in (process.stdout, process.stderr) if pipe is not None]
    buffers = [bytearray() for _ in pipes]
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as ready:
        for pipe, buffer in zip(pipes, buffers, strict=True):
            stack.enter_context(pipe)
            ready.register(pipe, selectors.EVENT_READ, buffer)
        while ready.get_map():
            for key, _ in ready.select(_left(until)):
                piece = os.read(key.fd, 1 << 16)
                key.data.extend(piece)
                if not piece:
                    ready.unregister(key.fileobj)
                elif len(key.data) > MAX_BYTES:
                    raise ConfigError(
                        f"plugin {plugin.command!r}: its output has more than {MAX_BYTES} bytes"
                    )
    try:
        process.wait(_left(until))
    except subprocess.TimeoutExpired as error:
        raise TimeoutError from error
    return bytes(buffers[0]), b"".join(buffers[1:])


def _left(until: float) -> float:
    """Return the seconds until a deadline.

    Raises:
        TimeoutError: the deadline has passed.
    """
    if (left := until - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def _cluster_info(cluster: ClusterEntry, proxy: str) -> dict[str, Any]:
    """Return the description of the cluster that a plugin gets. The authority's file may be read.

    Empty fields are left out; ``config`` is None if the cluster has no extension for plugins.

    Args:
        cluster: the cluster.
        proxy: proxy through which the cluster is reached; empty for none.

    Raises:
        OSError: the authority's file cannot be read.
        ValueError: the authority's data is not base64.
    """
    configs = [e.get("extension") for e in cluster.extensions if e.get("name") == EXEC_EXTENSION]
    info: dict[str, Any] = {
        "server": cluster.server,
        "tls-server-name": cluster.tls_server_name,
        "insecure-skip-tls-verify": cluster.insecure,
        "certificate-authority-data": base64.b64encode(cluster.authority()).decode(),
        "proxy-url": proxy,
        "disable-compression": cluster.disable_compression,
    }
    info = {key: value for key, value in info.items() if value}
    return info | {"config": configs[0] if configs else None}


def _answer(plugin: Exec, document: dict[str, Any]) -> UserCredentials:
    """Return the credentials in a plugin's answer. An expiry without a time zone is in UTC.

    Raises:
        ConfigError: the answer has neither a token nor a certificate, or only one of certificate
            and key.
        ValueError: the answer is of another version, or its expiry is no time.
        LookupError: a field is missing; TypeError or AttributeError if one has another type.
    """
    if document["apiVersion"] != plugin.api_version or document["kind"] != "ExecCredential":
        raise ValueError("of another version")
    status = document["status"]
    token, cert, key = (
        str(status.get(name) or "") for name in ("token", "clientCertificateData", "clientKeyData")
    )
    if bool(cert) != bool(key) or not (token or cert):
        raise ConfigError(f"plugin {plugin.command!r}: it returned neither a token nor a key")
    until = datetime.fromisoformat(status.get("expirationTimestamp") or _NEVER)
    return UserCredentials(
        f"{BEARER} {token}" if token else "",
        cert.encode(),
        key.encode(),
        until if until.tzinfo else until.replace(tzinfo=UTC),
    )


# --- Proxies ---


def environments_proxy(server: str, environ: Mapping[str, str]) -> str:
    """Return the proxy for a server, by the rules of Go's ``httpproxy``; empty for none.

    A server on this machine, or one in ``NO_PROXY``, has none. A proxy without a scheme gets
    ``http://``.

    Args:
        server: URL of the API server.
        environ: HTTPS_PROXY, HTTP_PROXY and NO_PROXY, or the same names in small letters.

    Raises:
        ValueError: the port of the server is no valid number.
    """
    parts = urlsplit(server)
    proxy = _variable(environ, f"{parts.scheme.upper()}_PROXY")
    port = str(parts.port or (443 if parts.scheme == "https" else 80))
    if not proxy or _goes_direct(parts.hostname or "", port, _variable(environ, "NO_PROXY")):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def _variable(environ: Mapping[str, str], name: str) -> str:
    """Return a variable, whose name may be in capital or small letters."""
    return environ.get(name) or environ.get(name.lower()) or ""


def _goes_direct(host: str, port: str, exceptions: str) -> bool:
    """Return whether a host is reached without a proxy.

    This applies to ``localhost``, to loopback addresses, and to hosts in ``NO_PROXY``.

    Args:
        host: host name or IP address of the server.
        port: port of the server.
        exceptions: value of ``NO_PROXY``: entries with commas between them.
    """
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
    """Return whether one entry of ``NO_PROXY`` applies to a host. A wrong entry never does.

    The entry is a network, an address or a name, the last two with an optional port. A name also
    applies to its subdomains; one that begins with a dot applies to these only.

    Args:
        rule: the entry, in small letters.
        host: host name or IP address of the server.
        port: port of the server.
        address: the host as an IP address; None if it is a name.
    """
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
    """Return an IP address (an IPv4-mapped address as IPv4); None if the text is not an address."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def files(environ: Mapping[str, str]) -> list[str]:
    """Return the default kubeconfig files: those in ``KUBECONFIG``, else ``~/.kube/config``.

    They need not exist, and a name may be empty.
    """
    named = environ.get("KUBECONFIG", "")
    home = environ.get("HOME") or os.path.expanduser("~")
    return named.split(os.pathsep) if named else [f"{home}/.kube/config"]
