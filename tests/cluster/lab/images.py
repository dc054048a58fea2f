"""Images: built from the Dockerfile without Docker, kept in one OCI layout, and copied to nodes.

Only layers that a node lacks are copied. After a change of a Python file this is one small layer,
without the base and the libraries.
"""

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.lab.parts import Say, digest
from tests.cluster.lab.settings import CACHE, HERE, PYTHON_IMAGE, ROOT
from tests.cluster.lab.shell import LabError, alone, run

TARGETS = ("operator", "master", "agent", "examples")
PREFIX = "dlrover.test"  # a registry that does not exist: what is not loaded is not found elsewhere
PAUSE = f"{PREFIX}/pause:1"
DEBIAN = "bookworm"
PACKAGES = ("python3", "python3-venv", "ca-certificates")
LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")
INPUTS = (
    "Dockerfile", ".dockerignore", "pyproject.toml", "constraints.txt", "README.md", "LICENSE",
    "dlrover_py", "agent", "operator", "examples",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Image:
    """An image in the OCI layout of the cache. Its tag is a hash of its content."""

    name: str

    @property
    def there(self) -> bool:
        """Whether the image is in the cache."""
        return _find(self.name) is not None

    def load(self, containerd: Path) -> None:
        """Import the image into a containerd. Only blobs that it lacks are sent."""
        manifest = _find(self.name)
        if manifest is None:
            raise LabError(f"{self.name} was not built")
        command = ["ctr", "-a", str(containerd), "-n", "k8s.io"]
        has = set(run(*command, "content", "ls", "-q").split())
        with subprocess.Popen(
            [*command, "images", "import", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stdin is not None and process.stderr is not None  # noqa: PT018
            try:
                self._write(process.stdin, manifest, has)
                process.stdin.close()
            except BrokenPipeError:
                pass  # its standard error has the reason
            said = process.stderr.read().decode()
        if process.returncode:
            raise LabError(f"import of {self.name}: {said.strip()}")

    def _write(self, out: Any, manifest: dict[str, Any], has: set[str]) -> None:
        names = {
            "io.containerd.image.name": self.name,
            "org.opencontainers.image.ref.name": self.name.rpartition(":")[2],
        }
        index = {"schemaVersion": 2, "manifests": [{**manifest, "annotations": names}]}
        with tarfile.open(fileobj=out, mode="w|") as tar:
            for name, data in (
                ("oci-layout", {"imageLayoutVersion": "1.0.0"}),
                ("index.json", index),
            ):
                body = json.dumps(data).encode()
                info = tarfile.TarInfo(name)
                info.size = len(body)
                tar.addfile(info, io.BytesIO(body))
            for blob in _blobs(manifest):
                if blob not in has:
                    tar.add(_path(blob), f"blobs/{blob.replace(':', '/')}")


def system(say: Say) -> list[Image]:
    """Return the images of every node: pause, and the base with python and a shell."""
    pause, base = Image(PAUSE), Image(base_name())
    if pause.there and base.there:
        return [pause, base]
    with alone(CACHE / "images.lock"):
        if not pause.there:
            folder = CACHE / "pause"
            folder.mkdir(parents=True, exist_ok=True)
            run("gcc", "-O2", "-static", "-o", folder / "pause", HERE / "pause.c")
            recipe = 'FROM scratch\nCOPY pause /pause\nENTRYPOINT ["/pause"]\n'
            _build(PAUSE, folder, "-f", "-", stdin=recipe)
        return [pause, _base(say)]


def tag() -> str:
    """Return the tag of DLRover's images: a hash of all their inputs."""
    return digest(_inputs(), PYTHON_IMAGE or base_name())


def ours(say: Say) -> dict[str, Image]:
    """Return the images of the Dockerfile by target, built from the present working tree."""
    found = {t: Image(f"{PREFIX}/{t}:{tag()}") for t in TARGETS}
    if all(image.there for image in found.values()):
        return found  # without waiting for the build of another working tree
    with alone(CACHE / "images.lock"):
        base = PYTHON_IMAGE or f"localhost/{_base(say).name}"
        for target, image in found.items():
            if not image.there:
                say(f"building the image of the {target}")
                _build(image.name, ROOT, "--target", target, "--build-arg",
                       f"PYTHON_IMAGE={base}", *_host())  # fmt: skip
        return found


def base_name() -> str:
    """Return the name of the base image: Debian with python3 and a shell."""
    return f"{PREFIX}/base:{digest([], DEBIAN, *PACKAGES, *LEFT_OUT)}"


def _base(say: Say) -> Image:
    image = Image(base_name())
    if not image.there:
        say(f"making a base image of Debian {DEBIAN} (once; a minute or two)")
        folder = CACHE / "base"
        folder.mkdir(parents=True, exist_ok=True)
        left_out = [f"--dpkgopt=path-exclude={p}" for p in LEFT_OUT]
        run("mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(PACKAGES)}",
            *left_out, DEBIAN, folder / "base.tar", within_s=1200)  # fmt: skip
        _build(image.name, folder, "-f", "-", stdin="FROM scratch\nADD base.tar /\n")
        (folder / "base.tar").unlink()
    return image


def _inputs() -> Iterator[Path]:
    for name in INPUTS:
        path = ROOT / name
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (f for f in files if f.is_file() and f.suffix != ".pyc")


def _host() -> list[str]:
    """Return options that mount this machine's settings for packages during the build."""
    lent = [p for p in ("/etc/pip.conf", "/etc/ssl/certs") if Path(p).exists()]
    return [a for p in lent for a in ("-v", f"{p}:{p}:ro")]


def _build(name: str, context: Path, *options: str, stdin: str | None = None) -> None:
    storage = ["--root", str(CACHE / "storage"), "--runroot", str(CACHE / "storage-run")]
    env = {**os.environ, "BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "overlay"}
    local = f"localhost/{name}"
    (CACHE / "storage").mkdir(parents=True, exist_ok=True)
    pull = "--pull" if PYTHON_IMAGE else "--pull-never"
    run("buildah", *storage, "bud", "--layers", pull, "--network", "host", "-t", local, *options,
        context, env=env, stdin=stdin, within_s=1800)  # fmt: skip
    run("buildah", *storage, "push", "--disable-compression", local,
        f"oci:{CACHE / 'images'}:{name}", env=env, within_s=600)  # fmt: skip


def _path(blob: str) -> Path:
    return CACHE / "images" / "blobs" / blob.replace(":", "/")


def _find(name: str) -> dict[str, Any] | None:
    try:
        index = json.loads((CACHE / "images" / "index.json").read_text())
    except FileNotFoundError:
        return None
    for manifest in index["manifests"]:
        if manifest.get("annotations", {}).get("org.opencontainers.image.ref.name") == name:
            return {k: manifest[k] for k in ("mediaType", "digest", "size")}
    return None


def _blobs(manifest: dict[str, Any]) -> list[str]:
    body = json.loads(_path(manifest["digest"]).read_text())
    return [manifest["digest"], body["config"]["digest"], *(x["digest"] for x in body["layers"])]
