"""Run the user's script in a worker's interpreter, as ``python -u script.py`` would.

The module runs before the user's code, and below it on the stack, so it imports as little as
possible. It is used in cold workers that are observed, and in workers forked from a zygote. Their
interpreter was started with ``-c``. The module corrects the differences from a start with a script
(CPython: Modules/main.c, pymain_run_file and pymain_run_module).
"""

import os
import sys
from types import CodeType, ModuleType, TracebackType

from dlrover_py.process import probe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BOOT = (
    "import sys\np = sys.path\nif p[:1] == ['']: p.pop(0)\n"
    "from dlrover_agent.warm.{module} import main\nmain()"
)
"""Program for ``python -c``.

It removes the empty entry of ``sys.path``, so that nothing is imported from the working directory.
"""
OBSERVED_START = BOOT.format(module="script")
"""Program for ``python -c`` that starts a worker cold, with observation."""
_OWN_FILES = (os.path.dirname(__file__), "<string>")
"""Beginnings of the file names of DLRover's own stack frames."""
_MAX_CALLSTACK = 65_536
"""Characters of an exception that are written to the error file."""
OF_ENVIRON = ("os.py", "<frozen os>", "_collections_abc.py", "<frozen _collections_abc>")
"""Ends of the file names of frames between ``os.environ`` and the code that uses it."""


def main() -> None:
    """Run ``python -u -c OBSERVED_START RECORD INSTALLED [-m] SCRIPT ARGS…`` as a cold start."""
    record, installed, *argv = sys.argv[1:]
    changes = changes_at_start()
    watch(record, tuple(installed.split(os.pathsep)), changes)
    start_probe()
    run_script([sys.executable, "-u", *argv])


def start_probe() -> None:
    """Start the thread that tells the agent what this worker does, also while it hangs."""
    probe.start(os.environ, _collectives)  # noqa: TID251 - the variables of this worker


def _collectives() -> "list[dict[str, Any]]":
    """Return the newest collectives of this process, for the probe."""
    from dlrover_py.trainer import torch_compat  # the process has torch, as it has collectives

    return torch_compat.flight_records()


def run_script(command: list[str]) -> None:
    """Run ``PYTHON -u [-m] SCRIPT ARGS…`` in this process, in the real ``__main__``.

    The function returns to the top of the interpreter, or raises there what the script raised. So
    the interpreter ends as after a script, with the same atexit handlers, threads and exit code. An
    exception of the script is also written to the error file. The function changes ``sys.argv``,
    ``sys.path`` and the names in ``__main__``.

    Raises:
        BaseException: What the script has raised, or SystemExit(2) if it cannot be read.
    """
    _show_command_line(command)
    sys.orig_argv[:] = command
    argv = command[2:]
    module = argv[0] == "-m"
    if module:
        argv = argv[1:]
    sys.argv[:] = argv
    scope = sys.modules["__main__"].__dict__
    for name in [n for n in scope if n not in _INITIAL_NAMES]:
        del scope[name]
    try:
        if module:
            if not sys.flags.safe_path:
                sys.path.insert(0, os.getcwd())
            sys.argv[0] = "-m"
            import runpy

            runpy._run_module_as_main(argv[0])  # type: ignore[attr-defined]
        else:
            if not sys.flags.safe_path:
                sys.path.insert(0, os.path.dirname(os.path.realpath(argv[0])))
            exec(_compiled(argv[0], scope), scope)
    except SystemExit:
        raise
    except BaseException as error:
        _write_error_file(error)
        _hide_own_frames()
        raise


_INITIAL_NAMES = {
    *("__name__", "__doc__", "__package__", "__loader__", "__spec__"),
    *("__annotations__", "__builtins__"),
}
"""The names in ``__main__`` before any code has run."""


def _compiled(path: str, scope: "dict[str, Any]") -> CodeType:
    """Compile a script, and prepare its namespace as CPython does.

    If the script cannot be read, an error is printed and the process exits with 2.

    Raises:
        SystemExit: The script cannot be read.
        SyntaxError: The script cannot be compiled.
    """
    path = os.path.join(os.getcwd(), path)  # not normalized, as in CPython
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        text = f"{sys.executable}: can't open file {path!r}: "
        sys.stderr.write(f"{text}[Errno {error.errno}] {error.strerror}\n")
        sys.exit(2)
    from importlib.machinery import SourceFileLoader

    scope.update(__loader__=SourceFileLoader("__main__", path), __file__=path, __cached__=None)
    return compile(source, path, "exec", dont_inherit=True)


def _write_error_file(error: BaseException) -> None:
    """Write the exception that ends the script to the error file, in the format of torch's record.

    The format is that of torch/distributed/elastic/multiprocessing/errors/error_handler.py. The
    file keeps the exception if a signal kills the process while the interpreter ends. A file that
    exists already was written by torch, and is not changed. KeyboardInterrupt is not written, and
    errors of the file are ignored.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")  # noqa: TID251 - torch's, of the script
    if not path or not isinstance(error, Exception):
        return
    import json
    from datetime import UTC, datetime
    from traceback import format_exception, format_exception_only

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OWN_FILES):
        trace = trace.tb_next
    callstack = "".join(format_exception(type(error), error, trace))
    if len(callstack) > _MAX_CALLSTACK:
        callstack = f"{callstack[: _MAX_CALLSTACK // 2]}…{callstack[-_MAX_CALLSTACK // 2 :]}"
    message = "".join(format_exception_only(type(error), error)).strip()[:_MAX_CALLSTACK]
    more = {"py_callstack": callstack, "timestamp": str(int(datetime.now(UTC).timestamp()))}
    document = json.dumps({"message": {"message": message, "extraInfo": more}})
    try:
        with open(path, "x") as file:
            file.write(document)
    except OSError:
        return


def _hide_own_frames() -> None:
    """Let the interpreter report the current exception without DLRover's stack frames.

    The function replaces ``sys.excepthook`` until the first report. Only the outer frames, which
    lead to the script, are hidden.
    """
    report = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = report
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OWN_FILES):
            trace = trace.tb_next
        sys.last_traceback = trace
        report(kind, error.with_traceback(trace), trace)

    sys.excepthook = hook


def _show_command_line(command: list[str]) -> None:
    """Show the script's command line to ``ps`` and ``pkill -f``, if there is space for it.

    Otherwise the command line of the interpreter's start stays.
    """
    with open("/proc/self/stat", "rb") as stat:
        # The list begins with field 3 (state); arg_start and arg_end are fields 48 and 49.
        fields = stat.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"".join(os.fsencode(part) + b"\0" for part in command)
    if len(text) <= end - start:
        try:
            with open("/proc/self/mem", "r+b", buffering=0) as memory:
                memory.seek(start)
                memory.write(text.ljust(end - start, b"\0"))
        except OSError:  # the process may not be inspected, not even by itself
            return


# --- Observation ---


def changes_at_start() -> "dict[str, str | None]":
    """Return the variables that code has changed which ran when the interpreter started.

    Such code is in sitecustomize, usercustomize and .pth files. A zygote runs it without the
    variables of a rank. The value of a removed variable is None. Nothing is found if the kernel
    does not show the environment at the start: a worker must not fail for this.
    """
    try:
        with open("/proc/self/environ", "rb") as file:
            pairs = [pair.partition(b"=") for pair in file.read().split(b"\0")]
    except OSError:
        return {}
    before = {
        os.fsdecode(name): os.fsdecode(value) for name, equals, value in pairs[::-1] if equals
    }
    now: dict[str, str | None] = dict(os.environ)  # noqa: TID251 - the script's variables
    changed = {name: now.get(name) for name in {*before, *now} if now.get(name) != before.get(name)}
    if "LC_CTYPE" not in before:
        changed.pop("LC_CTYPE", None)  # Python itself sets it in the C locale
    return changed


def watch(
    record: str, installed: tuple[str, ...], changes: "dict[str, str | None] | None" = None
) -> None:
    """Record all later imports, and the script's changes to ``os.environ``, in a file.

    The function installs a finder before the one that searches ``sys.path``. A finder costs nothing
    while nothing is imported, and needs no thread. An audit hook would cost time: torch's
    optimizers call ``id()``, which is audited.

    The file is mapped into memory, so that the record of a killed worker is complete. Each line is
    a tuple in Python's syntax: ``('import', name, origin)``, ``('env', key, value)`` or
    ``('env', key, None)``. An import that failed is recorded too, because it will fail again. The
    first lines are ``('start', key, value)``, of :func:`changes_at_start`.

    If the file cannot be mapped, nothing is recorded. The record ends before the first line that
    does not fit: a later one may depend on it.

    Args:
        record: Path of a file of zeros, as large as the record may become. Its space must be
            reserved: without a free block, a write to memory kills the process.
        installed: Folders of the standard library and of installed packages.
        changes: What :func:`changes_at_start` has found; None in a forked worker.

    Raises:
        OSError: The file cannot be opened.
    """
    import _thread
    import ctypes
    from importlib.machinery import ModuleSpec, PathFinder

    # Not with the mmap module, because its objects keep a file descriptor.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    fd = os.open(record, os.O_RDWR)
    size = os.fstat(fd).st_size
    start = libc.mmap(None, size, 3, 1, fd, 0)  # PROT_READ | PROT_WRITE, MAP_SHARED
    os.close(fd)
    if start == ctypes.c_void_p(-1).value:
        return
    at, end, copy = start, start + size, ctypes.memmove
    owner = os.getpid()
    # Reentrant: a signal handler may import a module while its thread holds the lock.
    one_at_a_time = _thread.RLock()
    os.register_at_fork(after_in_child=one_at_a_time._at_fork_reinit)  # type: ignore[attr-defined]

    def note(*what: str | None) -> None:
        """Append a line to the record, in the observed process only; end it without space."""
        nonlocal at, end
        line = f"{what!a}\n".encode()
        length = len(line)
        with one_at_a_time:
            if os.getpid() != owner:
                return
            if at + length >= end:
                end = at
                return
            # A signal handler may note a line of its own during the copy, behind this one.
            place, at = at, at + length
            copy(place, line, length)

    for variable in sorted(changes or ()):
        note("start", variable, (changes or {})[variable])

    class Finder:
        """A finder that records imports, and otherwise does what PathFinder does."""

        @staticmethod
        def find_spec(
            name: str, path: "Any" = None, target: ModuleType | None = None
        ) -> ModuleSpec | None:
            spec = PathFinder.find_spec(name, path, target)
            # A call that only checks whether the module exists comes from another function.
            importing = sys._getframe(2).f_code.co_name == "_find_and_load_unlocked"
            if importing and spec is not None and spec.origin is not None:
                note("import", name, spec.origin)
            return spec

    def by_script() -> bool:
        """Return whether the code that changes the environment is not in an installed package."""
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.endswith(OF_ENVIRON):
            frame = frame.f_back
        return not frame.f_code.co_filename.startswith(installed)

    put, unset = os.putenv, os.unsetenv

    def putenv(name: "Any", value: "Any") -> None:
        put(name, value)
        if by_script():
            note("env", os.fsdecode(name), os.fsdecode(value))

    def unsetenv(name: "Any") -> None:
        unset(name)
        if by_script():
            note("env", os.fsdecode(name), None)

    os.putenv, os.unsetenv = putenv, unsetenv
    index = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else 0
    sys.meta_path.insert(index, Finder)
