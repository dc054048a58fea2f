"""A real cluster for tests: what runs on it, our images on it, and tools to hurt it.

``Cluster`` is one of three: the lab of this machine (all tools), the one of ``KUBECONFIG``, or
`kind` (there the tools that need a node's inside skip the test, and say so). Nothing here sleeps:
``until`` looks for a condition and has a deadline.
"""

import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.lab import images, parts, settings
from tests.cluster.lab.between import Between
from tests.cluster.lab.cluster import FAKE, Lab
from tests.cluster.lab.daemons import command, environment, started
from tests.cluster.lab.images import base_name
from tests.cluster.lab.node import Node
from tests.cluster.lab.shell import LabError, run
from tests.cluster.lab.waiting import until

__all__ = ["Cluster", "LabError", "Obj", "on_fakes", "send", "until"]
Obj = dict[str, Any]
LIBRARIES = "/opt/libraries"  # where our images take libraries from (Dockerfile)


def inside(pid: int, path: str) -> Path:
    """A file as that process sees it, from outside of its container."""
    return Path("/proc", str(pid), "root") / path.lstrip("/")


def send(number: signal.Signals, pids: Iterable[int]) -> None:
    """Signal processes; some may have just gone."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


class Cluster:
    """A Kubernetes cluster as its administrator, with hands on its machines."""

    def __init__(self, kubeconfig: Path, lab: Lab | None = None) -> None:
        self.kubeconfig, self._lab = kubeconfig, lab
        self._images: dict[str, str] = {}
        self._hurts: Counter[str] = Counter()
        found = str(lab.bin) + os.pathsep if lab else ""
        self.env = {**os.environ, "KUBECONFIG": str(kubeconfig), "PATH": found + os.environ["PATH"]}

    # Talk to it.

    def kubectl(self, *args: str, stdin: str | None = None, within_s: float = 120) -> str:
        """Run kubectl; its standard output. LabError with its words if it fails."""
        return self._run("kubectl", *args, stdin=stdin, within_s=within_s)

    def helm(self, *args: str, within_s: float = 300) -> str:
        """Run helm; its standard output."""
        return self._run("helm", *args, within_s=within_s)

    def get(self, kind: str, name: str, namespace: str = "") -> Obj | None:
        """An object, None if there is none."""
        said = self.kubectl("get", kind, name, *_of(namespace), "-ojson", "--ignore-not-found")
        return dict(json.loads(said)) if said.strip() else None

    def list(self, kind: str, namespace: str = "", labels: str = "") -> "list[Obj]":
        """Objects of a namespace, or of all of them."""
        where = _of(namespace) or ["--all-namespaces"]
        chosen = ["-l", labels] if labels else []
        return list(json.loads(self.kubectl("get", kind, *where, *chosen, "-ojson"))["items"])

    def apply(self, *objects: Obj, namespace: str = "") -> None:
        """Create or change objects, by server-side apply."""
        body = yaml.safe_dump_all(objects)
        self.kubectl("apply", "--server-side", "-f", "-", *_of(namespace), stdin=body)

    def refusal(self, obj: Obj, namespace: str) -> str:
        """Why it may not be created; "" if it may. Who admits it may hear of what was changed
        just now a little later."""
        try:
            self.kubectl("create", "--dry-run=server", "-f", "-", "-n", namespace,
                         stdin=json.dumps(obj))  # fmt: skip
        except LabError as error:
            return str(error)
        return ""

    def make_namespace(self, name: str) -> None:
        """Create one; when this returns Pods can be made in it: it has its account."""
        self.kubectl("create", "namespace", name)
        until(lambda: self.get("serviceaccount", "default", name), f"the account of {name}")

    # What can be seen.

    @property
    def nodes(self) -> "list[str]":
        """Names of all nodes."""
        return self.kubectl("get", "nodes", "-ojsonpath={.items[*].metadata.name}").split()

    def node_ready(self, node: str) -> bool:
        """Whether Kubernetes believes that the node is well."""
        found = self.get("node", node)
        return found is not None and _condition(found, "Ready") == "True"

    def pod_ready(self, name: str, namespace: str) -> bool:
        """Whether the Pod is Ready."""
        pod = self.get("pod", name, namespace)
        return pod is not None and _condition(pod, "Ready") == "True"

    def pod_phase(self, name: str, namespace: str) -> str:
        """The Pod's phase, "" if it is gone."""
        pod = self.get("pod", name, namespace)
        return str(pod["status"].get("phase", "")) if pod else ""

    def logs(self, pod: str, namespace: str, *, container: str = "") -> str:
        """What a Pod has said so far; "" while there is nothing to read."""
        chosen = ["-c", container] if container else []
        with suppress(LabError):
            return self.kubectl("logs", pod, "-n", namespace, *chosen)
        return ""

    @contextmanager
    def following(self, pod: str, namespace: str) -> Iterator[Callable[[], str]]:
        """Read what a Pod says while the block runs; the call waits until it has ended.

        A Pod that is deleted takes its log with it: the block begins once something was read.
        """
        argv = ["logs", "-f", pod, "-n", namespace]
        program = shutil.which("kubectl", path=self.env["PATH"]) or "kubectl"
        until(lambda: self.logs(pod, namespace), f"{namespace}/{pod} says something")
        with (
            tempfile.NamedTemporaryFile() as file,
            subprocess.Popen([program, *argv], env=self.env, stdout=file) as log,
        ):
            read = Path(file.name).read_text

            def whole() -> str:
                log.wait(timeout=300)
                return read()

            try:
                until(lambda: read() or log.poll() is not None, "the first of it is read")
                yield whole
            finally:
                log.kill()

    def node_of(self, pod: str, namespace: str) -> str:
        """Where a Pod runs."""
        return str((self.get("pod", pod, namespace) or {}).get("spec", {}).get("nodeName", ""))

    # Our images, and what Pods need to run them.

    @property
    def base_image(self) -> str:
        """An image with python3 and a shell, on every node."""
        return (
            base_name() if self._lab else os.environ.get("DLROVER_BASE_IMAGE", "python:3.12-slim")
        )

    def image(self, target: str) -> str:
        """The name of our image of this target, built from the working tree, on every node."""
        if not self._images:
            self._images = self._load()
        if target not in self._images:
            raise LabError(f"there is no image of the {target}; there are {sorted(self._images)}")
        return self._images[target]

    def with_torch(self, template: Obj) -> Obj:
        """A Pod (or its template) whose containers of our images can ``import torch``.

        torch is too large for every image and every node: the libraries of the virtual environment
        that runs the tests are mounted instead, read-only. The image's own ones come first.
        """
        if self._lab is None:
            pytest.skip("torch is mounted from this machine: that needs the lab's own nodes")
        made = copy.deepcopy(template)
        spec = made["spec"]
        libraries = sysconfig.get_paths()["purelib"]
        spec.setdefault("volumes", []).append(
            {"name": "libraries", "hostPath": {"path": libraries, "type": "Directory"}}
        )
        mount = {"name": "libraries", "mountPath": LIBRARIES, "readOnly": True}
        for container in spec["containers"]:
            container.setdefault("volumeMounts", []).append(mount)
        return made

    # Faults of processes and Pods.

    def processes(
        self, pod: str, namespace: str, *, container: str = "", having: str = ""
    ) -> dict[int, str]:
        """Processes of a Pod's (only, or named) container: pid on this machine, command line.

        Perhaps only those that have this ``NAME=value`` in their environment.
        """
        found = self.get("pod", pod, namespace)
        if found is None:
            raise LabError(f"there is no Pod {namespace}/{pod}")
        for status in found["status"].get("containerStatuses", []):
            if container in ("", status["name"]) and status.get("containerID"):
                ident = status["containerID"].rpartition("/")[2]
                pids = self._node(found["spec"]["nodeName"]).processes(ident)
                return {
                    pid: said
                    for pid in pids
                    if (said := command(pid)) and (not having or having in environment(pid))
                }
        return {}

    def in_pods(self) -> dict[int, str]:
        """Processes of all Pods there are, and of those that should be gone: pid, command line."""
        nodes = self._needs_lab("see all processes").nodes.values()
        return {pid: said for n in nodes for pid in n.processes() if (said := command(pid))}

    def kill(
        self,
        pod: str,
        namespace: str,
        pattern: str = "",
        *,
        container: str = "",
        having: str = "",
        number: signal.Signals = signal.SIGKILL,
        within_s: float = 60,
    ) -> "list[int]":
        """Signal a Pod's processes whose command line has the pattern; pids, at least one.

        One that has just been started has none for a moment: it is waited for. With SIGKILL they
        are gone when this returns.
        """

        def look() -> dict[int, str]:
            return {
                pid: started(pid)
                for pid, said in self.processes(
                    pod, namespace, container=container, having=having
                ).items()
                if re.search(pattern, said)
            }

        words = f"a process of {namespace}/{pod} has {pattern!r} in its command line"
        try:
            pids = until(look, words, within_s=within_s if pattern else 0)
        except AssertionError as error:
            raise LabError(str(error)) from None
        send(number, pids)
        if number == signal.SIGKILL:
            until(
                lambda: not any(since and started(pid) == since for pid, since in pids.items()),
                f"{sorted(pids)} are gone",
                within_s=30,
                every_s=0.01,
            )
        return sorted(pids)

    def delete_pod(self, name: str, namespace: str, *, force: bool = False) -> None:
        """Order a Pod's deletion and return; by force it is gone from the API at once."""
        how = ["--grace-period=0", "--force"] if force else []
        self.kubectl("delete", "pod", name, "-n", namespace, "--wait=false", *how)

    # Faults of nodes.

    def cut_off(self, node: str) -> AbstractContextManager[None]:
        """Nothing reaches the node, and it reaches nobody, while the block runs."""
        return self._hurt(node, Node.cut, Node.mend)

    def cut_off_from_api(self, node: str) -> AbstractContextManager[None]:
        """Nothing on the node reaches the API server while the block runs; all else it does."""
        return self._hurt(node, Node.cut_api, Node.mend_api)

    def hung(self, node: str) -> AbstractContextManager[None]:
        """The node's kubelet hangs while the block runs: its Pods run on, and nobody ends them."""
        return self._hurt(node, Node.hang, Node.go_on)

    def crashed(self, node: str) -> AbstractContextManager[None]:
        """The node's power is off while the block runs; then it starts again."""
        return self._hurt(node, Node.crash, lambda n: n.start([]))

    def cordon(self, node: str) -> None:
        """No new Pods there."""
        self.kubectl("cordon", node)

    def uncordon(self, node: str) -> None:
        """New Pods again."""
        self.kubectl("uncordon", node)

    def drain(self, node: str, *, within_s: float = 180) -> None:
        """Evict all Pods of the node by the eviction API, which heeds disruption budgets."""
        self.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force",
                     f"--timeout={within_s:g}s", within_s=within_s + 60)  # fmt: skip

    # Faults of the control plane.

    def api_server_stopped(self) -> AbstractContextManager[None]:
        """It does not answer while the block runs: connections hang (SIGSTOP)."""
        return self._needs_lab("stop the API server").api_server_stopped()

    @contextmanager
    def etcd_stopped(self) -> Iterator[None]:
        """The API server can neither read nor write while the block runs (SIGSTOP).

        Afterwards Kubernetes may hold hosts for lost until it has heard of them again.
        """
        lab = self._needs_lab("stop etcd")
        with lab.etcd_stopped():
            yield
        for node in lab.nodes:
            until(lambda n=node: self._is_back(n), f"{node} is Ready again")

    def api_server_killed(self) -> AbstractContextManager[None]:
        """It is gone while the block runs: connections are refused (SIGKILL)."""
        return self._needs_lab("kill the API server").api_server_killed()

    def between(self) -> AbstractContextManager[Between]:
        """Pods that start while the block runs reach the API server through a proxy."""
        return self._needs_lab("stand between Pods and the API server").between()

    def compact(self) -> None:
        """All history is gone: no watch can go on from where it was."""
        self._needs_lab("compact its history").compact()

    # What it was asked for.

    def asked(self, account: str, namespace: str) -> "list[Obj]":
        """What a service account has asked of the API server, the oldest first: audit events.

        Of a watch the start counts, of all else the end.
        """
        found = self._needs_lab("read its audit log").asked(
            f"system:serviceaccount:{namespace}:{account}"
        )
        return [e for e in found if (e["stage"] == "ResponseStarted") == (e["verb"] == "watch")]

    def fake_nodes(self, number: int, *, pods: int = 250) -> AbstractContextManager["list[str]"]:
        """So many more nodes for so many Pods each, on which nothing runs; see `on_fakes`."""
        return self._needs_lab("have fake nodes").fake_nodes(number, pods)

    # How.

    def heal(self) -> None:
        """What a test left cordoned is no longer."""
        for node in self.list("nodes"):
            if node["spec"].get("unschedulable"):
                self.uncordon(node["metadata"]["name"])

    def _run(self, *argv: str, **options: Any) -> str:
        # The path of the program by our PATH, not by the one of this process.
        program = shutil.which(argv[0], path=self.env["PATH"])
        if program is None:
            raise LabError(f"there is no {argv[0]} on this machine")
        return run(program, *argv[1:], env=self.env, **options)

    def _needs_lab(self, what: str) -> Lab:
        if self._lab is None:
            pytest.skip(f"to {what}, the cluster has to be the lab of this machine")
        return self._lab

    def _node(self, name: str) -> Node:
        return self._needs_lab("reach into a node").nodes[name]

    @contextmanager
    def _hurt(self, name: str, hurt: Any, mend: Any) -> Iterator[None]:
        """And wait for the node once nothing hurts it any more: these blocks may be nested."""
        node = self._node(name)
        hurt(node)
        self._hurts[name] += 1
        try:
            yield
        finally:
            mend(node)
            self._hurts[name] -= 1
            if not self._hurts[name]:
                until(lambda: self._is_back(name), f"{name} is Ready again")

    def _is_back(self, node: str) -> bool:
        with suppress(LabError):  # who was hurt may answer, and not for a moment more
            return self.node_ready(node)
        return False

    def _load(self) -> dict[str, str]:
        if self._lab is not None:
            return {t: i.name for t, i in self._lab.load_ours().items()}
        given = {t: os.environ.get(f"DLROVER_IMAGE_{t.upper()}", "") for t in images.TARGETS}
        if settings.KIND and not any(given.values()):
            return _kind_images()
        if not any(given.values()):
            pytest.skip("an existing cluster needs DLROVER_IMAGE_OPERATOR, …_MASTER and …_AGENT")
        return {t: name for t, name in given.items() if name}


@contextmanager
def cluster_for_tests() -> Iterator[Cluster]:
    """The cluster that there is, or one that lives as long as the tests."""
    lab = Lab()
    if settings.KUBECONFIG and str(lab.kubeconfig) != settings.KUBECONFIG:
        yield Cluster(Path(settings.KUBECONFIG))
        return
    if settings.KIND:
        with _kind() as kubeconfig:
            yield Cluster(kubeconfig)
        return
    why = parts.obstacle(may_install=settings.REQUIRED)
    if why and settings.REQUIRED:
        pytest.fail(f"DLROVER_REQUIRE_CLUSTER=1, but {why}")
    if why:
        pytest.skip(why)
    parts.install(lab.say)
    was_up = lab.running
    try:
        lab.up(len(lab.nodes) if was_up else settings.NODES)
        yield Cluster(lab.kubeconfig, lab)
    finally:
        if not was_up:
            lab.down()


@contextmanager
def _kind() -> Iterator[Path]:
    """A cluster of `kind`, where there is Docker."""
    if not (shutil.which("kind") and shutil.which("docker")):
        pytest.skip("DLROVER_CLUSTER_KIND=1, but there is no kind or no docker")
    name = settings.NAME
    kubeconfig = settings.STATE / f"kind-{name}.kubeconfig"
    kubeconfig.parent.mkdir(parents=True, exist_ok=True)
    was_up = name in run("kind", "get", "clusters").split()
    if was_up:
        run("kind", "export", "kubeconfig", "--name", name, "--kubeconfig", kubeconfig)
    else:
        workers = [{"role": "worker"}] * settings.NODES
        config = {"kind": "Cluster", "apiVersion": "kind.x-k8s.io/v1alpha4",
                  "nodes": [{"role": "control-plane"}, *workers]}  # fmt: skip
        run("kind", "create", "cluster", "--name", name, "--kubeconfig", kubeconfig,
            "--config", "-", "--wait", "120s", stdin=json.dumps(config), within_s=600)  # fmt: skip
    try:
        yield kubeconfig
    finally:
        if not was_up:
            run("kind", "delete", "cluster", "--name", name)


def _kind_images() -> dict[str, str]:
    tag = images.tag()
    built = {t: f"{images.PREFIX}/{t}:{tag}" for t in images.TARGETS}
    for target, name in built.items():
        run("docker", "build", "--target", target, "-t", name, settings.ROOT, within_s=1800)
        run("kind", "load", "docker-image", "--name", settings.NAME, name, within_s=600)
    return built


def on_fakes() -> Obj:
    """Of a template: Pods on fake nodes, which are Running as soon as they are there."""
    return {"nodeSelector": {FAKE: "yes"}, "tolerations": [{"key": FAKE, "operator": "Exists"}]}


def _of(namespace: str) -> "list[str]":
    return ["-n", namespace] if namespace else []


def _condition(obj: Obj, kind: str) -> str:
    conditions = obj.get("status", {}).get("conditions", [])
    return next((str(c["status"]) for c in conditions if c["type"] == kind), "")
