"""One node: a network namespace with its own containerd, kubelet and kube-proxy.

Faults are injected here: a node is cut off (its link is down) or crashed (its link is down, and all
its processes are killed), and repaired.
"""

import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.cluster.lab.daemons import Daemon, command
from tests.cluster.lab.images import PAUSE, Image
from tests.cluster.lab.shell import LabError, run, tail, try_run
from tests.cluster.lab.waiting import until

CGROUPS = Path("/sys/fs/cgroup")
UNIFIED = (CGROUPS / "cgroup.controllers").exists()
CONTROLLERS = (
    "cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids", "hugetlb",
    "net_cls", "net_prio", "perf_event", "systemd",
)  # fmt: skip


class Node:
    """A node of a cluster, with its state in a folder."""

    def __init__(self, folder: Path, name: str, cluster: int, programs: Path) -> None:
        self.folder, self.name, self.bin = folder, name, programs
        self.cluster, self.index = cluster, int(name.removeprefix("n"))
        self.unique = f"dlr{cluster}-{name}"  # name of its network namespace and its cgroup
        self.link = f"dlr{cluster}{name}"
        self.address = f"10.{cluster}.0.{10 + self.index}"
        self.pods = f"10.{cluster}.{128 + self.index}.0/24"

    @property
    def daemons(self) -> list[Daemon]:
        """The programs of the node. containerd is the first, because the kubelet needs it."""
        return [self._daemon(n) for n in ("containerd", "kubelet", "kube-proxy")]

    # --- Start and end ---

    def start(self, images: Sequence[Image]) -> None:
        """Start the node, also after a crash.

        Args:
            images: images that the node gets, the pause image first.
        """
        self._network()
        self._cgroups()
        self._configure()
        containerd, *others = self.daemons
        containerd.start(["containerd", "-c", self.folder / "containerd.json"], netns=self.unique)
        until(lambda: self._answers(containerd), f"containerd of {self.name} answers")
        self.load(images[:1])  # the pause image; the others are copied while the kubelet starts
        for daemon in others:
            daemon.start(self._command(daemon.record.stem), netns=self.unique)
        self.load(images[1:])

    def start_again(self, daemon: Daemon, said: str) -> bool:
        """Start a kubelet again that another one's start has ended; return False for other causes.

        All kubelets have one folder for the sockets of device plugins, whose path cannot be set.
        One that starts removes what is there, and binds its own. Two at once may get in each
        other's way.

        Args:
            daemon: the program of this node that has ended.
            said: the end of its log.
        """
        if "device-plugins/kubelet.sock: bind: address already in use" not in said:
            return False
        daemon.start(self._command(daemon.record.stem), netns=self.unique)
        return True

    def kill(self) -> None:
        """Kill all processes of the node, as when the power fails."""
        for daemon in reversed(self.daemons):
            daemon.signal(signal.SIGKILL)

        def left() -> list[int]:
            pids = [*self._shims(), *self.processes()]
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return pids

        until(lambda: not left(), f"nothing runs on {self.name}", within_s=30)
        until(lambda: not any(d.pid for d in self.daemons), "its programs have ended", within_s=10)

    def remove(self) -> None:
        """Remove the namespace, the link and the cgroups of a node whose processes have ended."""
        if try_run("ip", "link", "show", self.link):
            run("ip", "link", "del", self.link)
        if Path(f"/run/netns/{self.unique}").exists():
            run("ip", "netns", "del", self.unique)
        for top in self._tops():
            for folder, _, _ in os.walk(top, topdown=False):
                with suppress(OSError):  # the kernel may still use it; an empty cgroup is harmless
                    Path(folder).rmdir()

    # --- Faults ---

    def cut(self) -> None:
        """Cut the node off from the network. Its processes run on."""
        run("ip", "link", "set", self.link, "down")

    def mend(self) -> None:
        """Undo :meth:`cut`."""
        run("ip", "link", "set", self.link, "up")

    def redirect(self, port: int = 0) -> None:
        """Redirect new connections of its Pods to the API server to a port; 0 ends it."""
        n = self.cluster
        script = "iptables -w -t nat -N DLROVER 2>/dev/null; iptables -w -t nat -F DLROVER"
        if port:
            there = f"-d 10.{n}.64.1 -p tcp --dport 443 -j DNAT --to-destination 10.{n}.0.1:{port}"
            script += f"""
                iptables -w -t nat -C PREROUTING -j DLROVER 2>/dev/null ||
                    iptables -w -t nat -I PREROUTING -j DLROVER
                iptables -w -t nat -A DLROVER {there}"""
        run("nsenter", f"--net=/run/netns/{self.unique}", "sh", "-c", script)

    def hang(self) -> None:
        """Stop the kubelet (SIGSTOP). Other processes of the node run on."""
        self._daemon("kubelet").signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Undo :meth:`hang`."""
        self._daemon("kubelet").signal(signal.SIGCONT)

    def cut_api(self) -> None:
        """Cut the node off from the API server only, for existing and new connections."""
        self._drop_api(True)

    def mend_api(self) -> None:
        """Undo :meth:`cut_api`."""
        self._drop_api(False)

    def _drop_api(self, wanted: bool) -> None:
        n = self.cluster
        there = f"-d 10.{n}.0.1 -p tcp --dport {6500 + n} -j DROP"
        script = "; ".join(
            f"while iptables -w -D {chain} {there} 2>/dev/null; do :; done"
            + (f"; iptables -w -I {chain} {there}" if wanted else "")
            for chain in ("OUTPUT", "FORWARD")
        )
        run("nsenter", f"--net=/run/netns/{self.unique}", "sh", "-c", script)

    def crash(self) -> None:
        """Crash the node: programs end without a message, and no connection is closed."""
        self.cut()
        self.kill()

    # --- Content ---

    def ctr(self, *args: str) -> str:
        """Run ctr, the client of containerd, in the namespace of Kubernetes."""
        return run("ctr", "-a", self.socket, "-n", "k8s.io", *args)

    @property
    def socket(self) -> Path:
        """The socket of containerd."""
        return self.folder / "run" / "containerd.sock"

    def load(self, images: Sequence[Image]) -> None:
        """Copy images to the node that it lacks."""
        there = set(self.ctr("images", "ls", "-q").split())
        for image in images:
            if image.name not in there:
                image.load(self.socket)

    def processes(self, container: str = "") -> list[int]:
        """Return the process ids, on this machine, of one container or of all Pods of the node."""
        found: set[int] = set()
        for top in self._tops():
            for folder, _, _ in os.walk(top):
                if not container or container in folder:
                    with suppress(OSError):
                        found |= {int(p) for p in Path(folder, "cgroup.procs").read_text().split()}
            if found:
                break
        return sorted(found)

    # --- Internals ---

    def _daemon(self, name: str) -> Daemon:
        return Daemon(self.folder / f"{name}.pid", self.folder / "log" / f"{name}.log")

    def _answers(self, containerd: Daemon) -> bool:
        if not containerd.pid:
            raise LabError(f"containerd of {self.name} ended: {tail(containerd.log)}")
        return try_run("ctr", "-a", self.socket, "version")

    def _shims(self) -> list[int]:
        mine = f"-address {self.socket}"
        pids = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()]
        return [p for p in pids if mine in (said := command(p)) and "containerd-shim" in said]

    def _tops(self) -> list[Path]:
        if UNIFIED:
            return [CGROUPS / self.unique]
        return [top for c in CONTROLLERS if (top := CGROUPS / c / self.unique).exists()]

    def _network(self) -> None:
        if not Path(f"/run/netns/{self.unique}").exists():
            run("ip", "netns", "add", self.unique)
        if not try_run("ip", "link", "show", self.link):
            run("ip", "link", "add", self.link, "type", "veth", "peer", "name", "eth0",
                "netns", self.unique)  # fmt: skip
        run("ip", "link", "set", self.link, "master", f"dlr{self.cluster}", "up")
        inside = ("ip", "-n", self.unique)
        run(*inside, "addr", "replace", f"{self.address}/24", "dev", "eth0")
        run(*inside, "link", "set", "eth0", "up")
        run(*inside, "link", "set", "lo", "up")
        run(*inside, "route", "replace", "default", "via", f"10.{self.cluster}.0.1")
        for other in self._others():
            run(*inside, "route", "replace", f"10.{self.cluster}.{128 + other}.0/24",
                "via", f"10.{self.cluster}.0.{10 + other}")  # fmt: skip
        run("ip", "route", "replace", self.pods, "via", self.address)
        # Connections to addresses without a Service, such as the missing name server, are refused
        # immediately and each time. By default the kernel answers only once a second, and torch
        # looks up the names of its peers.
        nobody = f"FORWARD -d 10.{self.cluster}.64.0/18 -j REJECT"
        script = (
            "echo 1 >/proc/sys/net/ipv4/ip_forward; echo 0 >/proc/sys/net/ipv4/icmp_ratelimit; "
            f"iptables -C {nobody} 2>/dev/null || iptables -A {nobody}"
        )
        run("nsenter", f"--net=/run/netns/{self.unique}", "sh", "-c", script)

    def _others(self) -> list[int]:
        kept = json.loads((self.folder.parent / "cluster.json").read_text())
        return [i for i in range(1, int(kept["nodes"]) + 1) if i != self.index]

    def _cgroups(self) -> None:
        if UNIFIED:
            (CGROUPS / self.unique).mkdir(exist_ok=True)
            return
        for controller in CONTROLLERS:
            if (CGROUPS / controller).exists():
                (CGROUPS / controller / self.unique).mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):  # a new cpuset is empty
            all_of_them = (CGROUPS / "cpuset" / name).read_text()
            (CGROUPS / "cpuset" / self.unique / name).write_text(all_of_them)

    def _configure(self) -> None:
        for part in ("run", "cni", "kubelet", "containerd", "log"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        ipam = {
            "type": "host-local",
            "dataDir": str(self.folder / "run" / "cni"),
            "ranges": [[{"subnet": self.pods}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "hairpinMode": True}
        plugins = [
            {**bridge, "ipMasq": False, "ipam": ipam},
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ]
        network = {"cniVersion": "0.4.0", "name": "pods", "plugins": plugins}
        (self.folder / "cni" / "10-pods.conflist").write_text(json.dumps(network))
        (self.folder / "containerd.json").write_text(self._containerd())
        for name, kind, config in (
            ("kubelet", "kubelet.config.k8s.io/v1beta1", self._kubelet()),
            ("kube-proxy", "kubeproxy.config.k8s.io/v1alpha1", self._proxy()),
        ):
            (self.folder / f"{name}.json").write_text(json.dumps({"apiVersion": kind, **config}))

    def _containerd(self) -> str:
        cri = 'plugins."io.containerd.grpc.v1.cri"'
        return f"""
            version = 2
            root = "{self.folder}/containerd"
            state = "{self.folder}/run/containerd"
            [grpc]
              address = "{self.socket}"
            [{cri}]
              sandbox_image = "{PAUSE}"
              # Without this, every sandbox would fail if CAP_SYS_RESOURCE is missing.
              restrict_oom_score_adj = true
            [{cri}.cni]
              bin_dir = "/usr/lib/cni"
              conf_dir = "{self.folder}/cni"
            [{cri}.containerd]
              snapshotter = "overlayfs"
        """

    def _kubelet(self) -> dict[str, object]:
        return {
            "kind": "KubeletConfiguration",
            "address": self.address,
            "healthzBindAddress": "127.0.0.1",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.unique}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "podLogsDir": str(self.folder / "log" / "pods"),
            "nodeStatusUpdateFrequency": "3s",
            "nodeLeaseDurationSeconds": 8,
            "imageGCHighThresholdPercent": 100,
            "volumeStatsAggPeriod": "5s",
            "evictionHard": {
                "memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%",
            },
            "resolvConf": "/etc/resolv.conf",
            "clusterDomain": "cluster.local",
            # No server listens there, so lookups of Services fail immediately.
            "clusterDNS": [f"10.{self.cluster}.64.10"],
        }  # fmt: skip

    def _proxy(self) -> dict[str, object]:
        return {
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": str(self.folder.parent / "proxy.kubeconfig")},
            "mode": "iptables",
            "hostnameOverride": self.name,
            "clusterCIDR": f"10.{self.cluster}.128.0/17",
            "conntrack": {"maxPerCore": 0},
        }

    def _command(self, name: str) -> list[str | Path]:
        match name:
            case "kubelet":
                return [
                    self.bin / "kubelet", f"--config={self.folder}/kubelet.json",
                    f"--kubeconfig={self.folder.parent}/{self.name}.kubeconfig",
                    f"--root-dir={self.folder}/kubelet", f"--hostname-override={self.name}",
                    f"--cert-dir={self.folder}/kubelet/pki",  # all nodes share the default
                    f"--node-ip={self.address}",
                    f"--node-labels=topology.kubernetes.io/zone=z{self.index % 2}",
                ]  # fmt: skip
            case _:
                return [self.bin / "kube-proxy", f"--config={self.folder}/kube-proxy.json"]
