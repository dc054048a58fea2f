"""The zygote: the process that warm workers are forked from, with the script's modules imported.

The command is ``python -u -c BOOT ORDERS``. ORDERS is a JSON file with a :class:`ZygoteConfig`,
which names a Unix socket to the agent. The zygote imports what the recipe lists, tests itself in a
forked child, and reports whether it is fit. Then it forks processes on request. It never runs the
user's code, starts no thread and uses no device.

The messages are defined in :mod:`dlrover_py.protocol.zygote`. Apart from a few light modules of
DLRover, modules outside of the standard library are only imported by name, as the recipe says.
"""

import array
import atexit
import contextlib
import gc
import importlib
import importlib.machinery
import logging
import os
import select
import signal
import socket
import sys
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from dlrover_agent.warm import compiler, script
from dlrover_agent.warm.import_graph import ImportGraph, threads_that_forbid_forks
from dlrover_agent.warm.store_server import serve_store
from dlrover_py.process.identity import end_with_parent
from dlrover_py.protocol.zygote import (
    LENGTH,
    MAX_MESSAGE,
    STARTED,
    ForkAnswer,
    RecipeLine,
    StoreTask,
    WorkerTask,
    ZygoteConfig,
    ZygoteFitness,
    encode,
    read_request,
    read_task,
)

PART = 1 << 20
"""Largest number of bytes that are read from the socket in one call."""
PROBE_S = 20.0
"""Seconds that the forked child has for the test."""
NO_FORK = "fork: "
"""Beginning of a refusal because the kernel has made no process."""
_OOM_SCORE = "/proc/self/oom_score_adj"
"""File that says how soon the kernel kills this process when memory is short."""
_CUDA = "an import has initialised CUDA"
CUDA_ASKED = f"a forked child: {_CUDA}"
"""The result of the test if an import has used CUDA, or has asked whether there are devices."""
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Devices of which one is there if a machine has a driver for GPUs: NVIDIA, AMD, and WSL."""


class ForkTarget(NamedTuple):
    """The task of a forked child, its control socket, and the descriptors of the task."""

    task: WorkerTask | StoreTask
    control: socket.socket
    fds: list[int]


# --- Messages, for both ends of the socket ---


def send(line: socket.socket, body: bytes, fds: list[int] | None = None) -> None:
    """Send one message.

    Args:
        line: Socket to the other process.
        body: Message.
        fds: File descriptors to send with it.

    Raises:
        OSError: The message is too large, or the peer has closed the socket, or does not read
            within the socket's timeout. Without a timeout, the call waits.
    """
    _see_that_it_fits(len(body))
    data = len(body).to_bytes(LENGTH, "big") + body
    sent = socket.send_fds(line, [data], fds) if fds else line.send(data)
    line.sendall(data[sent:])


def receive(line: socket.socket) -> tuple[bytes, list[int]]:
    """Receive one message, and the file descriptors that were sent with it.

    The call waits without a limit if the socket has no timeout.

    Raises:
        EOFError: If the peer has closed the socket.
        OSError: If the message is too large, or the peer is silent for longer than the socket's
            timeout.
    """
    data, fds = _read(line, LENGTH, take_fds=True)
    size = int.from_bytes(data, "big")
    _see_that_it_fits(size)
    body, _ = _read(line, size)
    return body, fds


def _see_that_it_fits(size: int) -> None:
    if size > MAX_MESSAGE:
        raise OSError(f"a message has {size} bytes: expected at most {MAX_MESSAGE}")


def _read(line: socket.socket, size: int, *, take_fds: bool = False) -> tuple[bytes, list[int]]:
    """Read exactly this many bytes, and the file descriptors that were sent with them.

    Args:
        line: Socket to the other process.
        size: Number of bytes.
        take_fds: Whether to accept file descriptors; if not, the list is empty.

    Raises:
        EOFError: The peer has closed the socket.
        OSError: The peer is silent for longer than the socket's timeout.
    """
    data, fds = b"", array.array("i")
    while len(data) < size:
        room = socket.CMSG_SPACE(253 * fds.itemsize) if take_fds else 0
        # In parts, because recvmsg allocates the full size even if fewer bytes arrive.
        part, ancillary, _, _ = line.recvmsg(min(size - len(data), PART), room)
        for _, _, numbers in ancillary:
            fds.frombytes(numbers)
        if not part:
            raise EOFError
        data += part
    return data, list(fds)


# --- The zygote ---


def main() -> None:
    """Run a zygote, and in its children the requested worker or store.

    A zygote and a store do not return: they end with the agent. In a worker the call returns when
    the script has run, or raises what the script has raised.
    """
    changes = script.changes_at_start()
    orders = _read_orders(sys.argv[1])
    line = socket.socket(fileno=orders.socket)
    line.set_inheritable(False)
    end_with_parent(orders.agent)
    fork = Zygote(orders, line, changes).run()
    if isinstance(fork.task, StoreTask):
        serve_store(fork.task.store, fork.fds[0], fork.control.detach())
    argv, observe = fork.task.argv, fork.task.observe
    del fork
    if observe:
        script.watch(observe[0], tuple(observe[1].split(os.pathsep)))
    script.start_probe()
    script.run_script(argv)


def _read_orders(path: str | bytes) -> ZygoteConfig:
    """Return the configuration in a file.

    Raises:
        OSError: It cannot be read.
        ValueError: It is none.
    """
    with open(path, "rb") as file:
        return ZygoteConfig.decode(file.read(MAX_MESSAGE))


class Zygote:
    """The zygote process: it builds itself from a recipe, and then serves requests to fork."""

    def __init__(
        self, orders: ZygoteConfig, line: socket.socket, changes: dict[str, str | None]
    ) -> None:
        """Take what the zygote is told; nothing is imported yet.

        Args:
            orders: Its configuration.
            line: Its socket to the agent.
            changes: What :func:`dlrover_agent.warm.script.changes_at_start` has found.
        """
        self._orders, self._line, self._changes = orders, line, changes
        self._set_by_imports: dict[str, str] = {}
        """Environment variables that imports have set."""
        self._files: dict[str, tuple[int, int]] = {}
        """State of the imported files, by path."""
        self._frees_at_end = False
        """Whether workers must free at their end what the zygote has made."""
        self._oom_score = ""
        """The content of ``_OOM_SCORE`` before, for the children; empty if it was not changed."""

    def run(self) -> ForkTarget:
        """Build the zygote, report whether it is fit, and serve requests until the agent ends.

        The method returns in forked children only. When the agent ends, it exits the process.
        """
        self._be_killed_first()
        fitness = self._build()
        send(self._line, encode(fitness))
        while True:
            try:
                body, fds = receive(self._line)
            except (EOFError, OSError):
                os._exit(0)
            pids: list[int] = []
            try:
                request = read_request(body)
            except ValueError as error:
                refusal = f"the request is not understood: {error}"
            else:
                refusal = self.refusal_reason(request.checked) if request.checked else ""
            if not refusal and fds:
                try:
                    pids, fork = self._fork(fds)
                except OSError as error:
                    refusal = f"{NO_FORK}{error.strerror}"
                else:
                    if fork is not None:
                        return fork
            for fd in fds:
                os.close(fd)
            send(self._line, encode(ForkAnswer(pids, refusal)))

    def _be_killed_first(self) -> None:
        """Have the kernel kill the zygote before the workers when memory is short.

        A child may take the old value back: only a value below that of its start needs a right.
        """
        with contextlib.suppress(OSError):
            with open(_OOM_SCORE) as file:
                before = file.read().strip()
            with open(_OOM_SCORE, "w") as file:
                file.write("1000")
            self._oom_score = before

    # --- Build ---

    def _build(self) -> ZygoteFitness:
        """Import what the recipe lists, and find out whether workers can be forked.

        An import that fails is skipped, because the script's own import will fail, too. The result
        lists the modules that forbid forks, if they are known, with all modules that import them.
        """
        before, held = dict(os.environ), _open_files((0, 1, 2, self._line.fileno()))
        by_script: dict[str, str | None] = {}
        faults: dict[str, str] = {}
        graph = ImportGraph()
        # An early zygote gets no further names: its later recipe is another node's or run's.
        per_rank = {name for what, name, _ in self._orders.recipe if what == "rank"}
        per_rank |= set(self._orders.per_rank)
        with _rare_collections(), graph, _watched_environment(frozenset(per_rank)) as looked:
            for what, name, value in self._recipe():
                if what == "env" and name not in per_rank:
                    by_script[name] = value
                    _set_variable(name, value)
                if what != "import":
                    continue
                if value is not None and name not in sys.modules:
                    # A kept recipe may be another's: no module runs that it names wrongly.
                    if (found := origin_before_import(name)) is None:
                        continue
                    if found != value:
                        faults[name] = f"{name} is at {found}, and in the script at {value}"
                        continue
                try:
                    importlib.import_module(name)
                except Exception:  # noqa: BLE001 - the script's own import will fail, too
                    continue
                graph.find_threads(name)
                found = _origin(sys.modules.get(name), value)
                if value is not None and found != value:
                    faults[name] = f"{name} comes from {found}, and in the script from {value}"
        faults |= {chain[0]: f"{chain[0]} reads {key} when it is imported" for key, chain in looked}
        _fork_once()
        starters = graph.starters_of_threads()
        faults |= {name: f"threads of {name} survive a fork" for name in starters}
        if faults:
            chains = [name for _, chain in looked for name in chain]
            blame = graph.with_importers([*faults, *chains])
            return ZygoteFitness("; ".join(faults.values()), blame)
        for name in {*os.environ, *by_script}:
            if os.environ.get(name) == by_script.get(name, before.get(name)):
                _set_variable(name, before.get(name))
            elif name in os.environ:
                self._set_by_imports[name] = os.environ[name]
        for module in list(sys.modules.values()):
            if origin := _origin(module):
                self._remember_file(origin)
        compiler.compute_digests(self._remember_file)
        at_start = {name: value for what, name, value in self._orders.recipe if what == "start"}
        if at_start != self._changes:
            names = {name for name, _ in {*at_start.items()} ^ {*self._changes.items()}}
            return ZygoteFitness(
                "sitecustomize, usercustomize or a .pth file sets variables otherwise in the "
                f"workers than in the zygote, which has no rank: {', '.join(sorted(names))}"
            )
        for what, name, origin in self._orders.recipe:
            if what == "own" and name in sys.modules:
                return ZygoteFitness(f"{name} is not the module of the script ({origin})")
        if new := _shared_resources() - held:
            opened = ", ".join(sorted(new))
            return ZygoteFitness(f"an import, or code at the interpreter's start, opened {opened}")
        if logging.root.handlers:
            return ZygoteFitness("an import has configured logging")
        return self._test_fork()

    def _recipe(self) -> Iterator[RecipeLine]:
        """Yield the recipe's lines; remember the files before the first of them is imported.

        If the agent knows only the first lines yet, wait for the rest when these are imported. The
        process exits if the agent does not send it, or if a file has changed that was imported
        meanwhile: the recipe names it only now, so its state was not remembered.
        """
        began = time.time()
        yield from self._with_files()
        if self._orders.more:
            try:
                path, _ = receive(self._line)
                self._orders = _read_orders(path)
            except (EOFError, OSError, ValueError):
                os._exit(0)
            if any(_changed_since(began, module) for module in list(sys.modules.values())):
                os._exit(0)
            yield from self._with_files()

    def _with_files(self) -> Sequence[RecipeLine]:
        """Return the lines of the recipe as it is known, and remember the files of its imports."""
        for what, _, origin in self._orders.recipe:
            if what == "import" and origin is not None:
                self._remember_file(origin)
        return self._orders.recipe

    def _remember_file(self, origin: str) -> None:
        """Remember the state of a module's file."""
        if origin not in self._files and (state := _file_state(origin)) is not None:
            self._files[origin] = state

    def _test_fork(self) -> ZygoteFitness:
        """Test a fork.

        The objects of the zygote are kept from garbage collection from now on.
        """
        if children := _children():
            return ZygoteFitness(f"an import has started processes ({children})")
        gc.collect()
        # By id and dict: a class of a foreign metaclass may run code when it is asked.
        self._frees_at_end = any(
            type.__getattribute__(kind, "__dict__").get("__module__") == "nanobind"
            for kind in {id(type(one)): type(one) for one in gc.get_objects()}.values()
        )
        # Otherwise a child's garbage collector would write to every page, and so copy it.
        gc.freeze()
        fault = _probe()
        if fault == CUDA_ASKED and not any(map(os.path.exists, GPU_DRIVERS)):
            fault = _probe(cuda=False)  # workers will find no GPU either
        if not fault and threads_that_forbid_forks():
            fault = "threads that no module is known to have started survive a fork"
        return ZygoteFitness(fault, modules=len(sys.modules))

    # --- Requests ---

    def refusal_reason(self, argv: Sequence[str]) -> str:
        """Return why a cold start would import other modules than the zygote has.

        The result is empty if it would import the same.

        Args:
            argv: Command line of the workers.
        """
        for path, state in self._files.items():
            if _file_state(path) != state:
                return f"{path} has changed"
        try:
            own = os.getcwd() if argv[2] == "-m" else os.path.dirname(os.path.realpath(argv[2]))
        except FileNotFoundError:
            return "the working directory was deleted, and a start with -m expects it"
        installed = os.path.dirname(os.__file__)
        before = [own, *sys.path[: sys.path.index(installed)]] if installed in sys.path else [own]
        if sys.flags.safe_path:
            del before[0]
        for folder in before:
            for name in _importable(folder, sys.modules):
                origin = _origin(sys.modules.get(name))
                if origin in (None, "built-in", "frozen"):
                    continue
                if os.path.dirname(origin) not in (folder, os.path.join(folder, name)):
                    return f"{name} in {folder} hides {origin}"
        return ""

    def _fork(self, controls: list[int]) -> tuple[list[int], ForkTarget | None]:
        """Fork one child for each control socket, as orphans that the agent inherits.

        A process in between forks them and ends: the agent is a subreaper. A child returns only
        after the agent has given it a task, and has let it go (:meth:`_prepare_child`).

        Returns:
            In the zygote: the process ids, and None. Some are missing if a fork has failed. In a
            child: an empty list, and its task.

        Raises:
            OSError: The process in between cannot be forked.
        """
        read, write = os.pipe()
        intermediate = _fork()
        if intermediate == 0:
            for control in controls:
                try:
                    pid = _fork()
                except OSError:  # the agent notices that some are missing
                    os._exit(1)
                if pid == 0:
                    for fd in {read, write, *controls} - {control}:
                        os.close(fd)
                    return [], self._prepare_child(socket.socket(fileno=control))
                os.write(write, pid.to_bytes(4, "big"))
            os._exit(0)
        os.close(write)
        os.waitpid(intermediate, 0)
        with open(read, "rb") as pids:
            data = pids.read()
        return [int.from_bytes(data[i : i + 4], "big") for i in range(0, len(data), 4)], None

    def _prepare_child(self, control: socket.socket) -> ForkTarget:
        """Separate a child from the zygote, such that it is like a new process. Runs in the child.

        The child waits for a task and for the agent's signal to go, and ends if the agent gives it
        up. After the signal, a worker gets its own output, environment and random state, and
        reports its start. A store keeps the zygote's.
        """
        self._line.close()
        os.setsid()
        try:
            body, fds = receive(control)
            task, go = read_task(body), control.recv(1)
        except (EOFError, OSError, ValueError):
            os._exit(0)
        if not go:
            os._exit(0)  # the agent has given up the start, or has ended
        end_with_parent(self._orders.agent)
        if self._oom_score:
            with contextlib.suppress(OSError), open(_OOM_SCORE, "w") as file:
                file.write(self._oom_score)
        if isinstance(task, StoreTask):
            return ForkTarget(task, control, fds)
        for fd, number in zip(fds, (1, 2), strict=True):
            os.dup2(fd, number)
            os.close(fd)
        env = {**task.env, **self._changes, **self._set_by_imports}
        for name in {*os.environ, *env}:
            if os.environ.get(name) != env.get(name):
                _set_variable(name, env.get(name))
        _renew_random_state()
        if self._frees_at_end:
            # Else nanobind, with which triton is made, finds at the worker's end that nothing was
            # freed, and prints some 30 lines. Others do not notice, and end a second faster.
            atexit.register(gc.unfreeze)
        control.send(STARTED)
        control.close()
        return ForkTarget(task, control, [])


def _renew_random_state() -> None:
    """Create again what a process creates once and forked children must not share.

    It is the random state of numpy and torch, the key of multiprocessing and the start time of
    logging. Only modules that are already imported are changed. The modules random and tempfile
    handle forks themselves.
    """
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
        # Python 3.13 counts in nanoseconds.
        whole = isinstance(logs._startTime, int)
        logs._startTime = time.time_ns() if whole else time.time()


def _fork_once() -> None:
    """Fork a child that does nothing, so that pools with fork handlers end their threads.

    A child that hangs in such a handler is killed after ``PROBE_S``.
    """
    read, write = os.pipe()
    pid = _fork()
    if pid == 0:
        os._exit(0)
    os.close(write)
    with open(read, "rb", buffering=0):
        ended, _, _ = select.select([read], [], [], PROBE_S)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _probe(*, cuda: bool = True) -> str:
    """Test in a forked child what workers do; return what is wrong, or empty text.

    A child that does not answer within ``PROBE_S`` is killed, and the result says that it hangs. If
    the child dies without an answer, the result says that it crashes.

    Args:
        cuda: whether workers may need CUDA, which no import may have initialised then.
    """
    read, write = os.pipe()
    zygote = os.getpid()
    pid = _fork()
    if pid == 0:
        end_with_parent(zygote)
        os.close(read)
        try:
            fault = _exercise(cuda=cuda)
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


def _exercise(*, cuda: bool) -> str:
    """Use torch and numpy as workers do; return what is wrong, or empty text.

    Args:
        cuda: as in :func:`_probe`.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        if cuda and (torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork()):
            return _CUDA
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
    """Record reads of these environment variables: the module that reads, and its importers.

    The list that is yielded grows within the context. Reads of C code are not seen. A copy of all
    variables counts if the module's own code makes it. Functions of tqdm, networkx and fsspec look
    through all names when they are imported, for those that begin with their own.
    """
    looked: list[tuple[str, list[str]]] = []
    plain = type(os.environ)

    def note(what: str, frame: FrameType | None) -> None:
        chain = []
        while frame is not None:
            if frame.f_code.co_name == "<module>":
                chain.append(str(frame.f_globals.get("__name__")))
            frame = frame.f_back
        looked.append((what, [m for m in chain if m != "__main__"] or ["an import"]))

    class Watched(plain):  # type: ignore[misc, valid-type]
        def __getitem__(self, name: str) -> str:
            if name in names:
                note(name, sys._getframe(1))
            return str(super().__getitem__(name))

        def __iter__(self) -> Iterator[str]:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_code.co_filename.endswith(script.OF_ENVIRON):
                frame = frame.f_back
            if frame is not None and frame.f_code.co_name == "<module>":
                note("all variables", frame)
            return iter(super().__iter__())

    os.environ.__class__ = Watched
    try:
        yield looked
    finally:
        os.environ.__class__ = plain


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage rarely within the context, unless a module sets its own thresholds.

    Imports make many objects that stay. To look through them again and again costs a fifth of the
    time that ``import torch`` takes.
    """
    usual, rare = gc.get_threshold(), (1_000_000, 50, 50)
    gc.set_threshold(*rare)
    try:
        yield
    finally:
        if gc.get_threshold() == rare:
            gc.set_threshold(*usual)


def _shared_resources() -> set[str]:
    """Return the resources that forked children would share, unlike new processes.

    These are writable shared memory, sockets, devices, and kernel objects such as epoll. A lock in
    shared memory would stay locked if a child is killed while it holds the lock.
    """
    held = set()
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            if fields[1].startswith("rw-s") or "/dev/nvidia" in line:
                held.add(fields[5].strip() if len(fields) > 5 else "shared memory")
    shared = ("socket:", "anon_inode:", "/dev/nvidia", "/dev/kfd", "/dev/dri")
    return held | {x for x in _open_files(os.listdir("/proc/self/fd")) if x.startswith(shared)}


def _open_files(fds: Iterable[str | int]) -> set[str]:
    """Return what these descriptors of this process are open for, without those that are closed."""
    found = set()
    for fd in fds:
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def _fork() -> int:
    """Fork, without Python's warning about threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # _test_fork checks that threads end before a fork
        return os.fork()


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def origin_before_import(name: str) -> str | None:
    """Return the file that the import of a module would run.

    The result is None if there is no such file on ``sys.path``, or if the import would also run
    that of a package above the module.
    """
    path, package = None, ""
    for part in name.split(".")[:-1]:
        package = f"{package}.{part}".lstrip(".")
        if package in sys.modules:
            path = getattr(sys.modules[package], "__path__", None)
        else:
            spec = importlib.machinery.PathFinder.find_spec(package, path)
            if spec is None or spec.origin is not None:
                return None
            path = spec.submodule_search_locations  # of a package without a file
        if path is None:
            return None
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    return spec.origin if spec is not None else None


def _origin(module: ModuleType | None, default: str | None = None) -> str | None:
    """Return where a module was found: its file, ``built-in`` or ``frozen``; else the default."""
    origin = getattr(getattr(module, "__spec__", None), "origin", default)
    return origin if isinstance(origin, str) else default


def _changed_since(began: float, module: ModuleType) -> bool:
    """Return whether the file of a module was written, or replaced, after a time (Unix seconds)."""
    try:
        return os.stat(_origin(module) or "").st_ctime > began
    except OSError:  # it has no file
        return False


def _file_state(path: str) -> tuple[int, int] | None:
    """Return the modification time (ns) and size of a file; None if it cannot be read."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


_SUFFIXES = frozenset(importlib.machinery.all_suffixes())


def _importable(folder: str, wanted: Collection[str]) -> set[str]:
    """Return which of these modules and packages are in a folder; empty if it cannot be read.

    Packages without an ``__init__.py`` are left out. Other names cost no call of the file system: a
    script may be beside a large data set.
    """
    names = set()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                stem, dot, _ = entry.name.partition(".")
                if stem not in wanted:
                    continue
                if entry.name[len(stem) :] in _SUFFIXES or (
                    not dot and os.path.exists(os.path.join(entry.path, "__init__.py"))
                ):
                    names.add(stem)
    except OSError:
        pass
    return names


def _children() -> str:
    """Return the process ids of the main thread's children, separated by spaces."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read().strip()
