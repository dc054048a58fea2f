"""The programs of a cluster: installed packages, and programs that are built once and cached."""

import hashlib
import json
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from tests.cluster.lab.settings import CACHE, HERE
from tests.cluster.lab.shell import alone, run

KUBERNETES = "1.34.4"  # the newest version for cgroup v1 and containerd 1.6
HELM = "helm.sh/helm/v3/cmd/helm@v3.19.0"
KWOK = "sigs.k8s.io/kwok/cmd/kwok@v0.7.0"
KUEUE = "sigs.k8s.io/kueue@v0.17.0"
KUBE_SCORE = "github.com/zegl/kube-score/cmd/kube-score@v1.20.0"
PROGRAMS = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
    "kubectl",
    "kubelet",
)
FAKETIME = f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}/faketime/libfaketimeMT.so.1"
DEBIAN = {  # for each program: its Debian package
    "etcd": "etcd-server",
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "mmdebstrap": "mmdebstrap",
    "iptables": "iptables",
    "nft": "nftables",
    "conntrack": "conntrack",
    "ethtool": "ethtool",
    "socat": "socat",
    "ip": "iproute2",
    "gcc": "gcc",
    "/usr/include/stdlib.h": "libc6-dev",
    "buildah": "buildah",
    "openssl": "openssl",
    "nsenter": "util-linux",
    FAKETIME: "libfaketime",
}


def packages_missing() -> list[str]:
    """Return the Debian packages that are not installed."""
    return sorted(
        {package for program, package in DEBIAN.items() if shutil.which(program) is None
         and not (program.startswith("/") and Path(program).exists())}
    )  # fmt: skip


def obstacle(*, may_install: bool = False) -> str:
    """Return why no cluster can run on this machine, in one line; empty if one can."""
    if sys.platform != "linux":
        return "a cluster needs Linux (or KUBECONFIG of an existing one)"
    if os.geteuid() != 0:
        return "a cluster needs root (or KUBECONFIG of an existing one)"
    missing = packages_missing()
    if missing and not (may_install and shutil.which("apt-get")):
        return f"not installed: {' '.join(missing)}; `make cluster` installs them"
    if not (CACHE / "bin" / _build_name() / "kube").exists():
        found = re.search(r"go1\.(\d+)", run("go", "version")) if shutil.which("go") else None
        if found is None or int(found[1]) < 24:
            return "not installed: Go 1.24 or newer (https://go.dev/dl), which builds Kubernetes"
    return ""


def install(say: "Say") -> None:
    """Install the missing packages."""
    missing = packages_missing()
    if not missing:
        return
    say(f"installing {' '.join(missing)}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    apt = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *missing]
    run("apt-get", "update", "-q", env=env, within_s=600)
    run(*apt, env=env, within_s=900)


class Say:
    """Prints what is being done."""

    def __call__(self, words: str) -> None:
        print(f"cluster: {words}", file=sys.stderr, flush=True)


def digest(paths: Iterable[Path], *more: str) -> str:
    """Return a short hash of the contents of files and of other texts."""
    total = hashlib.sha256("\0".join(more).encode())
    for path in paths:
        total.update(f"\0{path.name}\0".encode())
        total.update(path.read_bytes())
    return total.hexdigest()[:12]


def build(say: Say) -> Path:
    """Build the programs that are not in the cache; return their folder."""
    folder = CACHE / "bin" / _build_name()
    with alone(CACHE / "build.lock"):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "kube").exists():
            say(f"building Kubernetes {KUBERNETES} from source (once; about 5 minutes on 2 cores)")
            _go_build(folder / "kube")
        for program in PROGRAMS:
            if not (folder / program).exists():
                (folder / program).symlink_to("kube")
        for name, module in (("helm", HELM), ("kwok", KWOK)):
            _install(say, folder, name, module)
    return folder


def linter(say: Say) -> Path:
    """Build kube-score in its own folder, because it is no part of a cluster; return its path."""
    folder = CACHE / "bin" / f"kube-score-{KUBE_SCORE.rpartition('@v')[2]}"
    with alone(CACHE / "build.lock"):
        folder.mkdir(parents=True, exist_ok=True)
        _install(say, folder, "kube-score", KUBE_SCORE)
    return folder / "kube-score"


def kueue(say: Say) -> Path:
    """Build Kueue in its own folder, with its definitions; return the folder."""
    folder = CACHE / "bin" / f"kueue-{KUEUE.rpartition('@v')[2]}"
    module, _, version = KUEUE.partition("@")
    with alone(CACHE / "build.lock"):
        folder.mkdir(parents=True, exist_ok=True)
        _install(say, folder, "kueue", f"{module}/cmd/kueue@{version}")
        if not (folder / "crds").exists():
            source = run("go", "mod", "download", "-json", KUEUE, cwd=folder, within_s=600)
            bases = Path(json.loads(source)["Dir"]) / "config/components/crd/bases"
            shutil.copytree(bases, folder / "crds.part", copy_function=shutil.copyfile)
            (folder / "crds.part").rename(folder / "crds")
    return folder


def _install(say: Say, folder: Path, name: str, module: str) -> None:
    if not (folder / name).exists():
        say(f"building {name} (once)")
        env = {**os.environ, "CGO_ENABLED": "0", "GOBIN": str(folder)}
        run("go", "install", "-trimpath", "-ldflags=-s -w", module, env=env,
            cwd=folder, within_s=1800)  # fmt: skip


def _build_name() -> str:
    sources = sorted((HERE / "kube").iterdir())
    return f"{KUBERNETES}-{digest(sources, HELM, KWOK)}"


def _go_build(target: Path) -> None:
    minor = KUBERNETES.split(".")[1]
    said = {
        "k8s.io/component-base/version.gitVersion": f"v{KUBERNETES}",
        "k8s.io/component-base/version.gitMajor": "1",
        "k8s.io/component-base/version.gitMinor": minor,
        "k8s.io/client-go/pkg/version.gitVersion": f"v{KUBERNETES}",
    }
    flags = " ".join(["-s -w", *(f"-X {name}={value}" for name, value in said.items())])
    built = target.with_name("kube.part")
    run("go", "build", "-trimpath", f"-ldflags={flags}", "-o", built, ".",
        env={**os.environ, "CGO_ENABLED": "0"}, cwd=HERE / "kube", within_s=3600)  # fmt: skip
    built.rename(target)
