"""The zygote: a process with the job's modules imported, from which workers are forked.

``python -u -c BOOT ORDERS``: a file of orders, and a unix socket to the agent. It replays the warm
recipe, tries itself out in a child, says whether it is fit, and then forks what it is asked for.
It never runs the user's code, starts no thread and touches no device.

Messages are JSON behind a length of four bytes (big endian); descriptors travel with the first
byte of a message. Up: one :class:`Fitness`, then an answer per request. Down: requests::

    {"fork": [{"argv": […], "env": {…}, "std": 2}, …]}    descriptors: control, 1 and 2 of each
    {"store": PORT}                                       descriptors: control, listening socket

Everything but the standard library is imported by name, as the recipe says.
"""

import array
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import json
import logging
import os
import select
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from dlrover_agent import script

LENGTH = 4
PART = 1 << 20
PROBE_S = 20.0
STARTED = b"s"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Orders:
    """What a zygote is started with."""

    socket: int
    """Descriptor of the line to the agent."""
    agent: int
    """Its process, the parent of workers."""
    recipe: Sequence[Sequence[str | None]]
    """``["import", name, origin]``, ``["env", key, value]``, ``["env", key, null]``, in order;
    ``["own", name, origin]`` must not be imported."""
    per_rank: list[str]
    """Environment names that differ between workers: no import may look at them."""


@dataclass(frozen=True, slots=True)
class Fitness:
    """What became of the recipe."""

    unfit: str = ""
    """Why nothing can be forked from here; empty if it can."""
    blame: list[str] = field(default_factory=list)
    """Modules at fault, with those that import them: without them it may be fit."""
    modules: int = 0


class Fork(NamedTuple):
    """What a child has to become."""

    request: dict[str, Any]
    fds: list[int]


# --- the line (both ends use it) ---


def send(line: socket.socket, message: object, fds: list[int] | None = None) -> None:
    """Send one message.

    Raises:
        OSError: the other side is gone, or does not read in the socket's time.
    """
    body = json.dumps(message).encode()
    data = len(body).to_bytes(LENGTH, "big") + body
    sent = socket.send_fds(line, [data], fds) if fds else line.send(data)
    line.sendall(data[sent:])


def receive(line: socket.socket) -> tuple[Any, list[int]]:
    """Receive one message.

    Raises:
        EOFError: the other side is gone.
        OSError: it stopped in the middle for longer than the socket's time, or what it said is
            no message.
    """
    data, fds = _read(line, LENGTH, take_fds=True)
    body, _ = _read(line, int.from_bytes(data, "big"))
    try:
        return json.loads(body), fds
    except (ValueError, RecursionError) as error:
        raise OSError(f"no message: {error}") from error


def _read(line: socket.socket, size: int, *, take_fds: bool = False) -> tuple[bytes, list[int]]:
    data, fds = b"", array.array("i")
    while len(data) < size:
        room = socket.CMSG_SPACE(253 * fds.itemsize) if take_fds else 0
        # Not all at once: so much memory is taken, whether it comes or not.
        part, ancillary, _, _ = line.recvmsg(min(size - len(data), PART), room)
        for _, _, numbers in ancillary:
            fds.frombytes(numbers)
        if not part:
            raise EOFError
        data += part
    return data, list(fds)


# --- the zygote ---


def main() -> None:
    """Build, serve, and in a child: become what was asked for; or serve a store at once."""
    if sys.argv[1] == "store":
        agent, *rest = map(int, sys.argv[2:])
        _die_with(agent)
        serve_store(*rest)
    with open(sys.argv[1]) as file:
        orders = Orders(**json.load(file))
    line = socket.socket(fileno=orders.socket)
    line.set_inheritable(False)
    _die_with(orders.agent)
    fork = Zygote(orders, line).run()
    if "store" in fork.request:
        serve_store(int(fork.request["store"]), fork.fds[1], fork.fds[0])
    argv = fork.request["argv"]
    del fork
    script.become(argv)


def serve_store(port: int, listening: int, control: int) -> NoReturn:
    """Serve the store of one round until killed."""
    distributed = importlib.import_module("torch.distributed")
    with socket.socket(fileno=os.dup(listening)) as where:
        host = str(where.getsockname()[0])
    host = {"::": "::1", "0.0.0.0": "127.0.0.1"}.get(host, host)
    store = distributed.TCPStore(
        host, port, None, True, wait_for_workers=False, master_listen_fd=listening
    )
    os.write(control, STARTED)
    while True:
        signal.pause()
        assert store is not None


class Zygote:
    """The process before and between the forks."""

    def __init__(self, orders: Orders, line: socket.socket) -> None:
        self._orders, self._line = orders, line
        self._made: dict[str, str] = {}
        self._files: dict[str, tuple[int, int]] = {}

    def run(self) -> Fork:
        """Serve until the agent goes; returns in children only."""
        fitness = self._build()
        send(self._line, asdict(fitness))
        while True:
            try:
                request, fds = receive(self._line)
            except (EOFError, OSError):
                os._exit(0)
            refusal = self._stale(request)
            pids: list[int] = []
            if not refusal:
                try:
                    pids, fork = self._fork(request, fds)
                except OSError as error:
                    refusal = f"fork: {error.strerror}"
                else:
                    if fork is not None:
                        return fork
            for fd in fds:
                os.close(fd)
            send(self._line, {"pids": pids, "refusal": refusal})

    # --- building ---

    def _build(self) -> Fitness:
        for what, _, origin in self._orders.recipe:
            if what == "import" and origin is not None:
                self._know(origin)
        before, held = dict(os.environ), _held()
        by_script: dict[str, str | None] = {}
        threads_by: list[str] = []
        with _watched_environment(frozenset(self._orders.per_rank)) as looked:
            for what, name, value in self._orders.recipe:
                assert name is not None
                if what == "env":
                    by_script[name] = value
                    _set(name, value)
                if what != "import":
                    continue
                threads = _threads()
                try:
                    importlib.import_module(name)
                except Exception:  # noqa: BLE001 - as in the script, which will say so
                    continue
                if looked:
                    key, chain = looked[0]
                    return Fitness(f"{chain[0]} looks at {key} when it is imported", blame=chain)
                if _threads() > threads:
                    threads_by.append(name)
                found = _origin(sys.modules.get(name), value)
                if value is not None and found != value:
                    where = f"{name} comes from {found}, and in the script from {value}"
                    return Fitness(where, blame=[name])
        for name in {*os.environ, *by_script}:
            if os.environ.get(name) == by_script.get(name, before.get(name)):
                _set(name, before.get(name))
            elif name in os.environ:
                self._made[name] = os.environ[name]
        for module in list(sys.modules.values()):
            if origin := _origin(module):
                self._know(origin)
        for what, name, origin in self._orders.recipe:
            if what == "own" and name in sys.modules:
                return Fitness(f"{name} is not the script's ({origin})")
        if new := _held() - held:
            return Fitness(f"an import holds {', '.join(sorted(new))}")
        if logging.root.handlers:
            return Fitness("an import has configured logging")
        return self._try_out(threads_by)

    def _know(self, origin: str) -> None:
        if origin not in self._files and (state := _state(origin)) is not None:
            self._files[origin] = state

    def _try_out(self, threads_by: list[str]) -> Fitness:
        if children := _children():
            return Fitness(f"an import has started processes ({children})")
        gc.collect()
        # The collector of a child would else write to, and so copy, every page.
        gc.freeze()
        fault = _probe()
        if not fault and _threads() > 1:
            # Pools that know of forks have ended their threads for it.
            fault = f"threads of {', '.join(threads_by)} survive a fork"
            return Fitness(fault, blame=threads_by)
        return Fitness(fault, modules=len(sys.modules))

    # --- serving ---

    def _stale(self, request: dict[str, Any]) -> str:
        """Why a cold start would import something else than what is here; empty if it would not."""
        if "store" in request:
            return ""
        for path, state in self._files.items():
            if _state(path) != state:
                return f"{path} has changed"
        argv = request["fork"][0]["argv"]
        own = os.getcwd() if argv[2] == "-m" else os.path.dirname(os.path.realpath(argv[2]))
        installed = os.path.dirname(os.__file__)
        before = [own, *sys.path[: sys.path.index(installed)]] if installed in sys.path else [own]
        if sys.flags.safe_path:
            del before[0]
        for folder in before:
            for name in _importable(folder):
                origin = _origin(sys.modules.get(name))
                if origin in (None, "built-in", "frozen"):
                    continue
                if os.path.dirname(origin) not in (folder, os.path.join(folder, name)):
                    return f"{name} in {folder} hides {origin}"
        return ""

    def _fork(self, request: dict[str, Any], fds: list[int]) -> tuple[list[int], Fork | None]:
        """Fork a process that forks what is wanted: orphans at once, they are the agent's."""
        wanted: list[dict[str, Any]] = request.get("fork", [request])
        each = len(fds) // len(wanted)
        read, write = os.pipe()
        middle = _fork()
        if middle == 0:
            for i, one in enumerate(wanted):
                try:
                    pid = _fork()
                except OSError:  # the agent sees that some are missing
                    os._exit(1)
                if pid == 0:
                    own = fds[i * each : (i + 1) * each]
                    for fd in {read, write, *fds} - set(own):
                        os.close(fd)
                    self._begin(one, own)
                    return [], Fork(one, own)
                os.write(write, pid.to_bytes(4, "big"))
            os._exit(0)
        os.close(write)
        os.waitpid(middle, 0)
        with open(read, "rb") as pids:
            data = pids.read()
        return [int.from_bytes(data[i : i + 4], "big") for i in range(0, len(data), 4)], None

    def _begin(self, one: dict[str, Any], own: list[int]) -> None:
        """In the child: undo what the fork has shared and a new process would not."""
        self._line.close()
        os.setsid()
        control = own[0]
        if not os.read(control, 1):
            os._exit(0)  # the agent has thought better of it, or is gone
        _die_with(self._orders.agent)
        if "store" in one:
            return
        for fd, number in zip(own[1:], (1, 2), strict=True):
            os.dup2(fd, number)
            os.close(fd)
        env = {**one["env"], **self._made}
        for name in {*os.environ, *env}:
            if os.environ.get(name) != env.get(name):
                _set(name, env.get(name))
        _unshare()
        os.write(control, STARTED)
        os.close(control)


def _unshare() -> None:
    """Draw anew what is drawn once per process; random and tempfile see to a fork themselves."""
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    processes: Any = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)
    logs: Any = sys.modules.get("logging")
    if logs is not None:
        # 3.13 counts in nanoseconds.
        whole = isinstance(logs._startTime, int)
        logs._startTime = time.time_ns() if whole else time.time()


def _probe() -> str:
    """Try in a child what workers will do; return what is wrong."""
    read, write = os.pipe()
    zygote = os.getpid()
    pid = _fork()
    if pid == 0:
        _die_with(zygote)
        os.close(read)
        try:
            fault = _exercise()
        except BaseException as error:  # noqa: BLE001
            fault = f"{type(error).__name__}: {error}"
        os.write(write, (fault or "fit").encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb", buffering=0) as answer:
        ready, _, _ = select.select([answer], [], [], PROBE_S)
        text = answer.read(1000) if ready else b"hangs"
    if not ready:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "" if text == b"fit" else f"a forked child: {text.decode() or 'crashes'}"


def _exercise() -> str:
    torch = sys.modules.get("torch")
    if torch is not None:
        if torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork():
            return "an import has initialised CUDA"
        matrix = torch.ones(600, 600, requires_grad=True)  # enough for threads
        (matrix @ matrix).exp().sum().backward()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.ones((600, 600)) @ numpy.ones((600, 600))
    return ""


@contextlib.contextmanager
def _watched_environment(
    names: frozenset[str],
) -> Iterator[list[tuple[str, list[str]]]]:
    """Note who asks for one of these names: its module, and those that import it."""
    looked: list[tuple[str, list[str]]] = []
    plain = type(os.environ)

    class Watched(plain):  # type: ignore[misc, valid-type]
        def __getitem__(self, name: str) -> str:
            if name in names:
                chain, frame = [], sys._getframe(1)
                while frame is not None:
                    if frame.f_code.co_name == "<module>":
                        chain.append(str(frame.f_globals.get("__name__")))
                    frame = frame.f_back  # type: ignore[assignment]
                looked.append((name, [m for m in chain if m != "__main__"] or ["an import"]))
            return str(super().__getitem__(name))

    os.environ.__class__ = Watched
    try:
        yield looked
    finally:
        os.environ.__class__ = plain


def _held() -> set[str]:
    """What children would share in a way that new processes do not: memory that is written by
    all (a lock in it would stay locked by one that was killed), sockets, devices."""
    held = set()
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            if fields[1].startswith("rw-s") or "/dev/nvidia" in line:
                held.add(fields[5].strip() if len(fields) > 5 else "shared memory")
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith(("socket:", "anon_inode:", "/dev/nvidia", "/dev/kfd", "/dev/dri")):
                held.add(target)
    return held


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads: that they end was seen to
        return os.fork()


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _origin(module: ModuleType | None, default: str | None = None) -> str | None:
    """Where a module was found: its file, ``built-in`` or ``frozen``."""
    origin = getattr(getattr(module, "__spec__", None), "origin", default)
    return origin if isinstance(origin, str) else default


def _state(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


_SUFFIXES = frozenset(importlib.machinery.all_suffixes())


def _importable(folder: str) -> set[str]:
    """Names of modules and packages that this folder has."""
    names = set()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                stem, dot, _ = entry.name.partition(".")
                if entry.name[len(stem) :] in _SUFFIXES or (
                    not dot and os.path.exists(os.path.join(entry.path, "__init__.py"))
                ):
                    names.add(stem)
    except OSError:
        pass
    return names


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _children() -> str:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read().strip()


def _die_with(parent: int) -> None:
    """Be killed when this parent dies; end at once if it has."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
