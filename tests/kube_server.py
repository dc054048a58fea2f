"""A real API server for tests: kube-apiserver and etcd as child processes, on free ports.

The program is the one in ``DLROVER_KUBE_BIN`` (a kube-apiserver, or a program that acts as one
under that name), or the one that ``make cluster`` has built.
"""

import os
import shutil
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fakes_kube import write_kubeconfig
from tests.process.harness import eventually, free_port

TOKEN = "admin-of-a-test"
USERS = {"ann": "ann-of-a-test", "bob": "bob-of-a-test"}
"""Tokens of users that have no rights of their own, by name."""


def programs() -> tuple[Path, Path] | str:
    """Return the programs of the API server and of etcd, or the reason why there are none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlrover-py/cluster"
    given = os.environ.get("DLROVER_KUBE_BIN")
    server = Path(given) if given else _newest(cache, "kube-apiserver")
    etcd = shutil.which("etcd") or _newest(cache, "etcd")
    if server is None or not server.is_file():
        return "no kube-apiserver: set DLROVER_KUBE_BIN"
    return (server, Path(etcd)) if etcd else "no etcd: install it (Debian: etcd-server)"


def kubectl() -> Path | str:
    """Return the program kubectl, or the reason why there is none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlrover-py/cluster"
    return _newest(cache, "kubectl") or "no kubectl: `make cluster` builds one"


def _newest(cache: Path, name: str) -> Path | None:
    found = [path for path in cache.glob(f"bin/**/{name}") if path.is_file()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


@contextmanager
def api_server(folder: Path, server: Path, etcd: Path) -> Iterator[Path]:
    """Run etcd and the API server; yield a kubeconfig of an administrator.

    Args:
        folder: folder for their files.
        server: program of the API server.
        etcd: program of etcd.
    """
    store, peer, port = free_port(), free_port(), free_port()
    program = folder / "kube-apiserver"  # the program acts according to its name
    program.symlink_to(server.resolve())
    users = "".join(f"{token},{name},{name}\n" for name, token in USERS.items())
    (folder / "tokens.csv").write_text(f"{TOKEN},admin,admin,system:masters\n{users}")
    key = folder / "account.key"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    urls = [f"http://127.0.0.1:{store}", f"http://127.0.0.1:{peer}"]
    commands: list[list[str | Path]] = [
        [
            etcd,
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls={urls[0]}",
            f"--advertise-client-urls={urls[0]}",
            f"--listen-peer-urls={urls[1]}",
            f"--initial-advertise-peer-urls={urls[1]}",
            f"--initial-cluster=default={urls[1]}",
            "--unsafe-no-fsync",
            "--log-level=error",
        ],
        [
            program,
            f"--etcd-servers={urls[0]}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            f"--cert-dir={folder / 'certificates'}",
            f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--disable-admission-plugins=ServiceAccount",
        ],
    ]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(commands):
            with (folder / f"{number}.log").open("wb") as out:
                running.append(subprocess.Popen(command, stdout=out, stderr=out))
        eventually(lambda: _ready(port, running, folder), "a ready API server", within_s=180)
        yield write_kubeconfig(
            folder / "kubeconfig",
            {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True},
            {"token": TOKEN},
        )
    finally:
        for process in reversed(running):
            process.kill()
            process.wait()


def _ready(port: int, running: list["subprocess.Popen[bytes]"], folder: Path) -> bool:
    for number, process in enumerate(running):
        log = folder / f"{number}.log"
        assert process.poll() is None, log.read_text()[-2000:]
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    asked = urllib.request.Request(
        f"https://127.0.0.1:{port}/readyz", headers={"Authorization": f"Bearer {TOKEN}"}
    )
    try:
        with urllib.request.urlopen(asked, context=context, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
