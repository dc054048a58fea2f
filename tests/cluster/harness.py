"""A real cluster for tests: its state, DLRover's images on it, and tools that inject faults.

``Cluster`` is one of three: the lab of this machine (with all tools), the cluster of
``KUBECONFIG``, or `kind`. On the last two, tools that need the inside of a node skip the test with
a reason. Nothing here sleeps: ``until`` polls a condition under a deadline.
"""

import builtins
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
from functools import partial
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
LIBRARIES = "/opt/libraries"  # folder from which the images load libraries (Dockerfile)


def inside(pid: int, path: str) -> Path:
    """Return the path of a file in the container of a process, as this machine sees it."""
    return Path("/proc", str(pid), "root") / path.lstrip("/")


def send(number: signal.Signals, pids: Iterable[int]) -> None:
    """Send a signal to processes. Processes that have ended are skipped."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


class Cluster:
    """A Kubernetes cluster, with the rights of its administrator and access to its machines."""

    def __init__(self, kubeconfig: Path, lab: Lab | None = None) -> None:
        self.kubeconfig, self._lab = kubeconfig, lab
        self._images: dict[str, str] = {}
        self._faults: Counter[str] = Counter()
        found = str(lab.bin) + os.pathsep if lab else ""
        self.env = {**os.environ, "KUBECONFIG": str(kubeconfig), "PATH": found + os.environ["PATH"]}

    # --- Commands ---

    def kubectl(self, *args: str, stdin: str | None = None, within_s: float = 120) -> str:
        """Run kubectl; return its standard output.

        Args:
            args: arguments of kubectl.
            stdin: standard input.
            within_s: seconds after which the command fails.

        Raises:
            LabError: kubectl fails. The message has its output.
        """
        return self._run("kubectl", *args, stdin=stdin, within_s=within_s)

    def helm(self, *args: str, within_s: float = 300) -> str:
        """Run helm; return its standard output."""
        return self._run("helm", *args, within_s=within_s)

    def get(self, kind: str, name: str, namespace: str = "") -> Obj | None:
        """Return an object; None if it does not exist."""
        said = self.kubectl("get", kind, name, *_of(namespace), "-ojson", "--ignore-not-found")
        return dict(json.loads(said)) if said.strip() else None

    def list(self, kind: str, namespace: str = "", labels: str = "") -> builtins.list[Obj]:
        """Return the objects of a namespace, or of all namespaces."""
        where = _of(namespace) or ["--all-namespaces"]
        chosen = ["-l", labels] if labels else []
        return list(json.loads(self.kubectl("get", kind, *where, *chosen, "-ojson"))["items"])

    def apply(self, *objects: Obj, namespace: str = "") -> None:
        """Create or change objects by server-side apply."""
        body = yaml.safe_dump_all(objects)
        self.kubectl("apply", "--server-side", "-f", "-", *_of(namespace), stdin=body)

    def refusal(self, obj: Obj, namespace: str) -> str:
        """Return why an object cannot be created; empty if it can.

        Admission may lag behind a change that was just made.
        """
        try:
            self.kubectl("create", "--dry-run=server", "-f", "-", "-n", namespace,
                         stdin=json.dumps(obj))  # fmt: skip
        except LabError as error:
            return str(error)
        return ""

    def make_namespace(self, name: str) -> None:
        """Create a namespace, and wait for its service account, so that Pods can be created."""
        self.kubectl("create", "namespace", name)
        until(lambda: self.get("serviceaccount", "default", name), f"the account of {name}")

    # --- State ---

    @property
    def nodes(self) -> builtins.list[str]:
        """The names of all nodes."""
        return self.kubectl("get", "nodes", "-ojsonpath={.items[*].metadata.name}").split()

    def node_ready(self, node: str) -> bool:
        """Return whether a node is Ready."""
        found = self.get("node", node)
        return found is not None and _condition(found, "Ready") == "True"

    def pod_ready(self, name: str, namespace: str) -> bool:
        """Return whether a Pod is Ready."""
        pod = self.get("pod", name, namespace)
        return pod is not None and _condition(pod, "Ready") == "True"

    def pod_phase(self, name: str, namespace: str) -> str:
        """Return the phase of a Pod; empty if the Pod does not exist."""
        pod = self.get("pod", name, namespace)
        return str(pod["status"].get("phase", "")) if pod else ""

    def logs(self, pod: str, namespace: str, *, container: str = "") -> str:
        """Return the log of a Pod; empty if there is none yet."""
        chosen = ["-c", container] if container else []
        with suppress(LabError):
            return self.kubectl("logs", pod, "-n", namespace, *chosen)
        return ""

    @contextmanager
    def following(self, pod: str, namespace: str) -> Iterator[Callable[[], str]]:
        """Follow the log of a Pod while the block runs.

        A deleted Pod has no log, so the block begins once a part of the log was read.

        Yields:
            A function that waits for the end of the Pod and returns its whole log.
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
        """Return the node of a Pod; empty if it has none."""
        return str((self.get("pod", pod, namespace) or {}).get("spec", {}).get("nodeName", ""))

    # --- Images ---

    @property
    def base_image(self) -> str:
        """An image with python3 and a shell, which is on every node."""
        return (
            base_name() if self._lab else os.environ.get("DLROVER_BASE_IMAGE", "python:3.12-slim")
        )

    def image(self, target: str) -> str:
        """Return the name of an image of DLRover, built from the working tree and on each node."""
        if not self._images:
            self._images = self._load()
        if target not in self._images:
            raise LabError(f"there is no image of the {target}; there are {sorted(self._images)}")
        return self._images[target]

    def with_torch(self, template: Obj) -> Obj:
        """Return a Pod (or a Pod template) whose containers can ``import torch``.

        torch is too large for the images. Instead, the libraries of the virtual environment that
        runs the tests are mounted read-only. The libraries of the image come first. What makes
        torch cheaper in tests (scripts/rare_gc.py, scripts/late_torch.py) works in Pods too.
        """
        if self._lab is None:
            pytest.skip("torch is mounted from this machine: that needs the lab's own nodes")
        made = copy.deepcopy(template)
        spec = made["spec"]
        libraries = sysconfig.get_paths()["purelib"]
        # Python reads the .pth files of the image's own folder in the order of the alphabet: these
        # come after libraries.pth.
        own = f"/opt/venv/lib/python{sysconfig.get_python_version()}/site-packages"
        mounts = [
            ("libraries", libraries, "Directory", LIBRARIES),
            ("late-torch", f"{libraries}/dlrover_late_torch.pth", "File", f"{own}/tests_1.pth"),
            ("rare-gc", f"{libraries}/dlrover_rare_gc.pth", "File", f"{own}/tests_2.pth"),
        ]
        spec.setdefault("volumes", []).extend(
            {"name": name, "hostPath": {"path": path, "type": kind}}
            for name, path, kind, _ in mounts
        )
        for container in spec["containers"]:
            container.setdefault("volumeMounts", []).extend(
                {"name": name, "mountPath": there, "readOnly": True} for name, _, _, there in mounts
            )
        return made

    # --- Faults of processes and Pods ---

    def processes(
        self, pod: str, namespace: str, *, container: str = "", having: str = ""
    ) -> dict[int, str]:
        """Return the processes of a Pod: process id on this machine, and command line.

        Args:
            pod: name of the Pod.
            namespace: namespace of the Pod.
            container: name of the container; empty for the first one.
            having: only processes with this ``NAME=value`` in their environment.
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
        """Return the processes of all Pods, including deleted ones: process id and command line."""
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
    ) -> builtins.list[int]:
        """Signal the processes of a Pod whose command line matches a pattern; return their ids.

        The call waits until there is such a process. After SIGKILL it waits until they are gone.

        Args:
            pod: name of the Pod.
            namespace: namespace of the Pod.
            pattern: regular expression; empty for all processes.
            container: name of the container; empty for the first one.
            having: only processes with this ``NAME=value`` in their environment.
            number: the signal.
            within_s: seconds to wait for a process.
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
        """Delete a Pod without waiting. With ``force`` it leaves the API immediately."""
        how = ["--grace-period=0", "--force"] if force else []
        self.kubectl("delete", "pod", name, "-n", namespace, "--wait=false", *how)

    # --- Faults of nodes ---

    def cut_off(self, node: str) -> AbstractContextManager[None]:
        """Cut a node off from the network while the block runs."""
        return self._inject(node, Node.cut, Node.mend)

    def cut_off_from_api(self, node: str) -> AbstractContextManager[None]:
        """Cut a node off from the API server only, while the block runs."""
        return self._inject(node, Node.cut_api, Node.mend_api)

    def hung(self, node: str) -> AbstractContextManager[None]:
        """Stop a node's kubelet while the block runs. Its Pods run on, and are not ended."""
        return self._inject(node, Node.hang, Node.go_on)

    def crashed(self, node: str) -> AbstractContextManager[None]:
        """Crash a node, as after a loss of power; start it again after the block."""
        return self._inject(node, Node.crash, lambda n: n.start([]))

    def cordon(self, node: str) -> None:
        """Cordon a node: it gets no new Pods."""
        self.kubectl("cordon", node)

    def uncordon(self, node: str) -> None:
        """Uncordon a node."""
        self.kubectl("uncordon", node)

    def drain(self, node: str, *, within_s: float = 180) -> None:
        """Evict all Pods of a node by the eviction API, which respects disruption budgets."""
        self.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force",
                     f"--timeout={within_s:g}s", within_s=within_s + 60)  # fmt: skip

    # --- Faults of the control plane ---

    def api_server_stopped(self) -> AbstractContextManager[None]:
        """Stop the API server while the block runs (SIGSTOP): connections hang."""
        return self._needs_lab("stop the API server").api_server_stopped()

    @contextmanager
    def etcd_stopped(self) -> Iterator[None]:
        """Stop etcd while the block runs (SIGSTOP): the API server can neither read nor write.

        After the block, wait until the nodes are Ready again: Kubernetes may have marked them as
        lost.
        """
        lab = self._needs_lab("stop etcd")
        with lab.etcd_stopped():
            yield
        for node in lab.nodes:
            until(partial(self._is_back, node), f"{node} is Ready again")

    def api_server_killed(self) -> AbstractContextManager[None]:
        """Kill the API server, and start it again after the block: connections are refused."""
        return self._needs_lab("kill the API server").api_server_killed()

    def between(self) -> AbstractContextManager[Between]:
        """Make Pods that start while the block runs reach the API server through a proxy."""
        return self._needs_lab("stand between Pods and the API server").between()

    def compact(self) -> None:
        """Compact all history of etcd, so that no watch can continue where it was."""
        self._needs_lab("compact its history").compact()

    # --- Requests ---

    def asked(self, account: str, namespace: str) -> builtins.list[Obj]:
        """Return the audit events of a service account's requests, the oldest first.

        Each request has one event: a watch that of its start, other requests that of their end.
        """
        found = self._needs_lab("read its audit log").asked(
            f"system:serviceaccount:{namespace}:{account}"
        )
        return [e for e in found if (e["stage"] == "ResponseStarted") == (e["verb"] == "watch")]

    def fake_nodes(
        self, number: int, *, pods: int = 250
    ) -> AbstractContextManager[builtins.list[str]]:
        """Add fake nodes, on which nothing runs, while the block runs; see `on_fakes`.

        Args:
            number: number of nodes.
            pods: largest number of Pods on each.
        """
        return self._needs_lab("have fake nodes").fake_nodes(number, pods)

    # --- Internals ---

    def heal(self) -> None:
        """Uncordon the nodes that a test has left cordoned."""
        for node in self.list("nodes"):
            if node["spec"].get("unschedulable"):
                self.uncordon(node["metadata"]["name"])

    def _run(self, *argv: str, **options: Any) -> str:
        # The program is searched in the PATH of this cluster, not in that of this process.
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
    def _inject(self, name: str, inject: Any, undo: Any) -> Iterator[None]:
        """Inject a fault into a node during the block. Blocks may be nested.

        After the last fault of the node, wait until the node is Ready.
        """
        node = self._node(name)
        inject(node)
        self._faults[name] += 1
        try:
            yield
        finally:
            undo(node)
            self._faults[name] -= 1
            if not self._faults[name]:
                until(lambda: self._is_back(name), f"{name} is Ready again")

    def _is_back(self, node: str) -> bool:
        with suppress(
            LabError
        ):  # after a fault, the API server may stop answering again for a moment
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
    """Yield the existing cluster, or one that is removed after the tests."""
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
    """Yield the kubeconfig of a cluster of `kind`, which needs Docker."""
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
    """Return fields of a Pod template for fake nodes, on which Pods are Running immediately."""
    return {"nodeSelector": {FAKE: "yes"}, "tolerations": [{"key": FAKE, "operator": "Exists"}]}


def _of(namespace: str) -> list[str]:
    return ["-n", namespace] if namespace else []


def _condition(obj: Obj, kind: str) -> str:
    conditions = obj.get("status", {}).get("conditions", [])
    return next((str(c["status"]) for c in conditions if c["type"] == kind), "")
