"""The address of the API server and the credentials for it: a kubeconfig or a service account.

The official client's code reads service accounts and renews OpenID tokens. It is imported only when
credentials are read.
"""

import asyncio
import contextlib
import logging
import math
import os
import ssl
import tempfile
from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

from dlrover_py.process.blocking import BackgroundThread, OverdueError, read_regular
from dlrover_py.protocol.errors import (
    ConfigError,
)
from dlrover_py.protocol.words import without_passwords

if TYPE_CHECKING:
    import subprocess

    import aiohttp

    from dlrover_py.kubernetes.kubeconfig import ClusterEntry, User, UserCredentials

log = logging.getLogger("kube")
T = TypeVar("T")

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder in which Kubernetes mounts a Pod's service account."""
_STALE_S = 60.0
"""Seconds after which files and credentials are read again."""
_STALE_LEAST_S = 1.0
"""Least number of seconds between two reads of refused credentials."""
_PLUGIN_SKEW_S = 300.0
"""Seconds before the expiry of a plugin's token at which the plugin is run again."""
_FILE = 1 << 20
"""Largest number of bytes read from a file of the service account."""


@dataclass(frozen=True, slots=True)
class CredentialTiming:
    """The time limits for credentials, in seconds."""

    plugin_timeout_s: float = 60.0
    """Limit of a kubeconfig's plugin. It may have to ask a person; after this time it is killed."""
    read_timeout_s: float = 10.0
    """Limit for reading the files that hold the server's address and the credentials. Their disk
    may hang."""
    reread_timeout_s: float = 2.0
    """Limit for reading the same files again while older credentials can still be used. All calls
    wait meanwhile."""


async def find_access(kubeconfig: Path | None, context: str | None) -> "ApiAccess":
    """Find the API server and the credentials, and read them.

    Without both arguments, a Pod's service account is used if no readable kubeconfig has a current
    context. A plugin of the kubeconfig may be run, which may take 60 s. The API server is not
    called.

    Args:
        kubeconfig: path of a kubeconfig; None for those that kubectl would read.
        context: name of a context; None for the current one.

    Raises:
        ConfigError: no configuration of a cluster was found, it cannot be used, or its disk does
            not answer.
    """
    from dlrover_py.kubernetes import kubeconfig as kubeconfigs

    given = [str(kubeconfig)] if kubeconfig else kubeconfigs.files(os.environ)
    access: ApiAccess = KubeconfigAccess(given, context)
    if not kubeconfig and not context and await access.read(lambda: _uses_pod_account(given)):
        access = ServiceAccountAccess(ACCOUNT, os.environ)
    await access.token()
    return access


def _uses_pod_account(files: Iterable[str]) -> bool:
    """Return whether to use this Pod's account: no readable kubeconfig names a current context.

    The result is False outside of a Pod, where ``KUBERNETES_SERVICE_HOST`` is not set.

    Raises:
        ConfigError: a readable file is not a kubeconfig.
    """
    from dlrover_py.kubernetes import kubeconfig

    readable = [path for path in files if os.access(path, os.R_OK)]
    return "KUBERNETES_SERVICE_HOST" in os.environ and not kubeconfig.read(readable).current


class ApiAccess:
    """The address of the API server and the credentials for it; both are read again when needed."""

    def __init__(self, where: str, timing: CredentialTiming | None) -> None:
        """Store the settings without a read.

        Args:
            where: The source of the configuration, for messages.
            timing: Time limits; None for the defaults.
        """
        self._timing = timing or CredentialTiming()
        self.host, self.namespace = "", "default"
        self.request_options: dict[str, Any] = {}
        """Arguments of aiohttp's requests: TLS and proxy."""
        self.headers: tuple[tuple[str, str], ...] = ()
        """Headers that impersonate another user."""
        self._where = where
        self._token = ""
        self._read_at, self._valid_until = -math.inf, -math.inf
        self._stamp: object = None
        self._reading = asyncio.Lock()
        self._disk = BackgroundThread("credentials")

    def distrust(self, error: "aiohttp.ClientConnectorCertificateError") -> str:
        """Return the message about a server certificate that is not trusted."""
        why = getattr(error.certificate_error, "verify_message", "") or error.certificate_error
        expected = f"one that is signed by the authority in {self._where}"
        return f"{self.host}: its certificate is refused: {why}; expected {expected}"

    async def read(self, call: Callable[[], T], *, within_s: float | None = None) -> T:
        """Run ``call``, which reads files, in a thread, and return its result.

        All calls use the same thread, one after the other. A call that has begun continues after
        the time limit.

        Args:
            call: reads files.
            within_s: seconds that the disk has to answer; None for the default.

        Raises:
            ConfigError: the disk does not answer in time. An exception of ``call`` is raised, too.
        """
        if within_s is None:
            within_s = self._timing.read_timeout_s
        try:
            return await self._disk.run(call, within_s)
        except OverdueError as error:
            message = f"it was not read within {within_s:g} s: its disk does not answer"
            raise ConfigError(message) from error

    async def token(self, refused: str | None = None) -> str:
        """Return the value of the ``Authorization`` header; empty if there is none.

        A service account and a token file are read again after 60 s, and a plugin's credentials
        when they expire. All other credentials are read again only after a refusal. If a read
        fails, a warning is logged, and what was read before is used for another 60 s.

        Args:
            refused: a value that the server has refused; None if there is none. Everything is then
                read again, unless another call has read another value since, or the last read began
                less than 1 s ago. In the second case the refused value is returned again.

        Raises:
            ConfigError: the configuration cannot be read, or cannot be used, for the first time or
                after a refusal.
        """
        now = asyncio.get_running_loop().time
        if refused is None and now() < self._valid_until:
            return self._token
        async with self._reading:
            # Fifty calls that are refused at the same time must not start a plugin fifty times.
            overtaken = self._token != refused or now() < self._read_at + _STALE_LEAST_S
            if now() >= self._valid_until or not overtaken:
                self._read_at = now()
                await self._read_or_keep(fresh=refused is not None)
        return self._token

    async def _read_or_keep(self, *, fresh: bool) -> None:
        """Read the configuration. If that fails for the moment, keep what was read before.

        A failure is then only logged, and the next read follows after 60 s.

        Args:
            fresh: Whether the server has refused the credentials. They are then not kept.

        Raises:
            ConfigError: the read fails, and there is nothing to keep.
        """
        kept = not fresh and self._valid_until >= 0
        try:
            times = self._timing
            await self._read(fresh, times.reread_timeout_s if kept else times.read_timeout_s)
        except ConfigError as error:
            if not kept:
                raise
            log.warning("credentials_kept", extra={"why": str(error)})
            self._valid_until = asyncio.get_running_loop().time() + _STALE_S

    async def _read(self, fresh: bool, within_s: float) -> None:
        """Read the configuration and take it over.

        An error leaves address and credentials as they were.

        Args:
            fresh: Whether the server has refused the credentials. The kubeconfig is then read
                again, too.
            within_s: Seconds that each read of a file may take.

        Raises:
            ConfigError: The configuration cannot be read, or cannot be used.
        """
        from kubernetes.aio.config import ConfigException

        try:
            endpoint, lasts_s = await self._configuration(fresh, within_s)
            await self._take(endpoint, within_s)
        except ConfigError as error:
            raise ConfigError(f"{self._where}: {error}") from error
        except (ConfigException, OSError, ValueError, LookupError) as error:
            raise ConfigError(f"{self._where}: {_config_message(error)}") from error
        self._valid_until = asyncio.get_running_loop().time() + lasts_s

    async def _configuration(self, fresh: bool, within_s: float) -> "tuple[ApiEndpoint, float]":
        """Read and return the configuration, and the seconds for which it is valid."""
        raise NotImplementedError

    async def _take(self, new: "ApiEndpoint", within_s: float) -> None:
        """Take over the whole configuration, or nothing of it.

        The TLS context is made again only if the certificates have changed.

        Args:
            new: The configuration.
            within_s: Seconds in which the TLS context must be made.

        Raises:
            ValueError: The address of the server or of the proxy has no usable scheme, or that of
                the server a user.
            ConfigError: The TLS context is not made in time, because a disk does not answer.
            OSError: The certificates or the key cannot be used (ssl.SSLError).
        """
        host = new.host.rstrip("/")
        parts = urlsplit(host)
        if parts.scheme not in ("http", "https") or "@" in parts.netloc:
            raise ValueError(f"server {without_passwords(host)!r}: expected https://host:port")
        if new.proxy and urlsplit(new.proxy).scheme not in ("http", "https"):
            proxy = without_passwords(new.proxy)
            raise ValueError(f"proxy {proxy!r}: only http:// and https:// can be used")
        stamp = (new.verify, new.authority, new.cert, new.key)
        trust = self.request_options.get("ssl")
        if stamp != self._stamp:
            trust = await self.read(lambda: _trust(new), within_s=within_s)
        options = {"ssl": trust, "server_hostname": new.server_name, "proxy": new.proxy}
        self.host, self._stamp = host, stamp
        self.request_options = {name: value for name, value in options.items() if value}
        self.headers = new.headers
        self._token = new.authorization.strip()


@dataclass(frozen=True, slots=True)
class ApiEndpoint:
    """The address of an API server, and the credentials for it. Certificates and key are PEM."""

    host: str
    authorization: str = ""
    """Value of the ``Authorization`` header."""
    headers: tuple[tuple[str, str], ...] = ()
    authority: bytes = b""
    """Certificates of the trusted authorities; empty for those of this machine."""
    cert: bytes = b""
    key: bytes = b""
    verify: bool = True
    server_name: str = ""
    proxy: str = ""


class ServiceAccountAccess(ApiAccess):
    """The access of a Pod's service account.

    Kubernetes replaces its token about each hour, and its authority sometimes. Within a cluster no
    proxy is used, even if the environment names one for other programs.
    """

    def __init__(
        self, folder: Path, env: Mapping[str, str], timing: CredentialTiming | None = None
    ) -> None:
        """Store the settings without a read.

        Args:
            folder: Where the service account is mounted.
            env: Environment, which has the address of the API server.
            timing: Time limits; None for the defaults.
        """
        super().__init__(f"service account in {folder}", timing)
        self._folder, self._env = folder, env

    async def _configuration(self, fresh: bool, within_s: float) -> tuple[ApiEndpoint, float]:
        """Read the mounted files; return the endpoint, and the seconds for which it is valid."""
        endpoint, self.namespace = await self.read(self._mounted, within_s=within_s)
        return endpoint, _STALE_S

    def _mounted(self) -> tuple[ApiEndpoint, str]:
        """Read the mounted files; return the endpoint and the namespace.

        The namespace is ``default`` if its file is missing or empty.
        """
        from kubernetes.aio.client import Configuration
        from kubernetes.aio.config import incluster_config

        config, namespace = Configuration(), b""
        authority = self._folder / "ca.crt"
        incluster_config.InClusterConfigLoader(
            token_filename=str(self._folder / "token"),
            cert_filename=str(authority),
            environ=self._env,
        ).load_and_set(config)
        with contextlib.suppress(FileNotFoundError):
            namespace = read_regular(self._folder / "namespace", _FILE)
        token = config.api_key.get("BearerToken", "")
        endpoint = ApiEndpoint(config.host, token, authority=read_regular(authority, _FILE))
        return endpoint, namespace.decode().strip() or "default"


class KubeconfigAccess(ApiAccess):
    """The access of a context of one kubeconfig, or of several that are merged."""

    def __init__(
        self,
        files: Sequence[str],
        context: str | None,
        timing: CredentialTiming | None = None,
    ) -> None:
        """Store the settings without a read.

        Args:
            files: Paths of the kubeconfigs, which are merged.
            context: Name of a context; None for the current one.
            timing: Time limits; None for the defaults.
        """
        super().__init__(f"kubeconfig {os.pathsep.join(files)}", timing)
        self._files, self._context = files, context
        self._chosen: tuple[ClusterEntry, User] | None = None
        self._plugin_credentials: UserCredentials | None = None
        """Credentials that a plugin has returned, until they expire."""

    async def _configuration(self, fresh: bool, within_s: float) -> tuple[ApiEndpoint, float]:
        """Return the endpoint, and the seconds for which it is valid. Run a plugin if needed.

        The kubeconfig itself is read the first time, and if ``fresh``. The files that it names are
        read each time. A plugin is run, or an OpenID provider asked, only if the kubeconfig has no
        other credentials. It is asked again only once its last credentials expire within 300 s.

        Args:
            fresh: Whether to read the kubeconfig again and to drop a plugin's credentials.
            within_s: Seconds that each read of a file may take.

        Raises:
            ConfigError: the context cannot be used, a disk does not answer, or the plugin fails.
            OSError: a file that the kubeconfig names cannot be read.
            ValueError: data in the kubeconfig is not base64, or the server's port is no number.
        """
        from dlrover_py.kubernetes import kubeconfig

        if fresh or self._chosen is None:
            chosen = await self.read(self._choose, within_s=within_s)
            self.namespace, self._chosen, self._plugin_credentials = chosen[0], chosen[1:], None
        cluster, user = self._chosen
        proxy = cluster.proxy_url or kubeconfig.environments_proxy(cluster.server, os.environ)
        credentials = await self.read(lambda: kubeconfig.known(user), within_s=within_s)
        lasts_s = _STALE_S if user.token_file else math.inf
        if credentials is None:
            if self._plugin_credentials is None or _remaining_s(self._plugin_credentials) <= 0:
                self._plugin_credentials = await self._run_plugin(cluster, user, proxy)
            credentials, lasts_s = (
                self._plugin_credentials,
                max(_remaining_s(self._plugin_credentials), _STALE_S),
            )
        authority = await self.read(cluster.authority, within_s=within_s)
        endpoint = ApiEndpoint(
            cluster.server,
            credentials.authorization,
            tuple(user.headers()),
            *(authority, credentials.cert, credentials.key),
            verify=not cluster.insecure,
            server_name=cluster.tls_server_name,
            proxy=proxy,
        )
        return endpoint, lasts_s

    def _choose(self) -> "tuple[str, ClusterEntry, User]":
        """Read the kubeconfigs; return the namespace, the cluster and the user of the context.

        Raises:
            ConfigError: no file exists, or the context cannot be used.
        """
        from dlrover_py.kubernetes import kubeconfig

        if not any(os.path.exists(path) for path in self._files):
            raise ConfigError(
                "there is no such file; give a kubeconfig, set KUBECONFIG, or run in a Pod"
            )
        context, cluster, user = kubeconfig.read(self._files).choose(self._context)
        kubeconfig.check(cluster, user)
        return context.namespace or "default", cluster, user

    async def _run_plugin(
        self, cluster: "ClusterEntry", user: "User", proxy: str
    ) -> "UserCredentials":
        """Run a plugin in a thread, because its program may lie on a disk that hangs.

        The plugin may take 60 s (``plugin_timeout_s``) and is then killed. If the user has no
        plugin, the user's OpenID provider is asked instead, within the same time.

        Args:
            cluster: Cluster that the credentials are for.
            user: User whose credentials are needed.
            proxy: Proxy through which the cluster is reached; empty for none.

        Raises:
            ConfigError: The plugin or the provider fails, or does not end in time.
        """
        from dlrover_py.kubernetes import kubeconfig

        began: list[subprocess.Popen[bytes]] = []
        limit_s = self._timing.plugin_timeout_s

        def ask() -> "UserCredentials":
            if user.exec is None:
                return kubeconfig.UserCredentials(
                    asyncio.run(asyncio.wait_for(_open_id(user), limit_s))
                )
            return kubeconfig.ask(
                user.exec, cluster, proxy, os.environ, within_s=limit_s, began=began.append
            )

        try:
            return await self._disk.run(ask, limit_s)
        except TimeoutError:
            raise ConfigError(f"its plugin did not end within {limit_s:g} s") from None
        finally:
            for process in began:
                if process.poll() is None:
                    process.kill()


def _remaining_s(credentials: "UserCredentials") -> float:
    """Return for how many seconds credentials can be used: until 300 s before they expire.

    The number is negative after that. It is thousands of years if they do not say.
    """
    return (credentials.expires_at - datetime.now(UTC)).total_seconds() - _PLUGIN_SKEW_S


async def _open_id(user: "User") -> str:
    """Return the token of a user of an OpenID provider; empty if there is none.

    An expired token is renewed by a request to the provider. The kubeconfig is not changed.

    Raises:
        ConfigError: the provider is not of the type ``oidc``.
    """
    from kubernetes.aio.client import Configuration
    from kubernetes.aio.config import kube_config

    provider = user.auth_provider or {}
    if provider.get("name") != "oidc":
        raise ConfigError(
            f"auth-provider {provider.get('name')!r}: expected oidc; clouds have plugins (exec)"
        )
    entries = {
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": "https://c"}}],
        "users": [{"name": "u", "user": {"auth-provider": provider}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }
    config = Configuration()
    await kube_config.KubeConfigLoader(entries).load_and_set(config)
    return str(config.api_key.get("BearerToken", ""))


def _trust(endpoint: ApiEndpoint) -> ssl.SSLContext:
    """Return the TLS context of an endpoint.

    Without an authority, the authorities of this machine are trusted. The client's key is written
    to a temporary file for a moment.

    Raises:
        OSError: the certificates or the key cannot be used (ssl.SSLError), or the temporary file
            cannot be written.
    """
    context = ssl.create_default_context(
        cadata=endpoint.authority.decode("ascii", "replace") or None
    )
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Python 3.13 refuses authorities without a key identifier, which old clusters have.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if endpoint.cert:
        with (
            tempfile.TemporaryDirectory() as folder
        ):  # OpenSSL reads only files; no other user can read these
            cert, key = Path(folder, "cert"), Path(folder, "key")
            cert.write_bytes(endpoint.cert)
            key.write_bytes(endpoint.key)
            context.load_cert_chain(cert, key, password="")
    if not endpoint.verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _config_message(error: Exception) -> str:
    """Return the reason of a configuration error for a person."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__
