"""In a worker's interpreter: become the script, as ``python -u script.py`` would.

Runs before the user's code and beneath it, in cold workers that are observed and in those forked
from a zygote, so it imports next to nothing. The interpreter was started with ``-c``; what that
leaves different from a start with a script (CPython: Modules/main.c, pymain_run_file and
pymain_run_module) is put right here.
"""

import os
import sys
from types import CodeType, ModuleType, TracebackType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BOOT = (
    "import sys\np = sys.path\nif p[:1] == ['']: p.pop(0)\n"
    "from dlrover_agent.{module} import main\nmain()"
)
"""What ``python -c`` runs; without the empty entry, so that nothing is imported from the cwd."""
COLD = BOOT.format(module="script")
_OURS = (os.path.dirname(__file__), "<string>")
_CALLSTACK = 65_536
"""Characters of an exception that are written to the error file."""
_NOT_THE_SETTER = ("os.py", "<frozen os>", "_collections_abc.py", "<frozen _collections_abc>")


def main() -> None:
    """A cold start that is observed: ``python -u -c COLD RECORD INSTALLED [-m] SCRIPT ARGS…``."""
    record, installed, *argv = sys.argv[1:]
    watch(record, tuple(installed.split(os.pathsep)))
    become([sys.executable, "-u", *argv])


def become(command: list[str]) -> None:
    """Run ``PYTHON -u [-m] SCRIPT ARGS…`` in this process, in the real ``__main__``.

    Returns, or raises what the script raised, to the top of the interpreter, which then ends as
    after a script: atexit, threads, exit code.
    """
    _show(command)
    sys.orig_argv[:] = command
    argv = command[2:]
    module = argv[0] == "-m"
    if module:
        argv = argv[1:]
    sys.argv[:] = argv
    scope = sys.modules["__main__"].__dict__
    for name in [n for n in scope if n not in _FRESH]:
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
        _record(error)
        _hide_our_frames()
        raise


_FRESH = {
    *("__name__", "__doc__", "__package__", "__loader__", "__spec__"),
    *("__annotations__", "__builtins__"),
}
"""What ``__main__`` holds before any code has run."""


def _compiled(path: str, scope: "dict[str, Any]") -> CodeType:
    path = os.path.join(os.getcwd(), path)  # not normalised, as CPython
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


def _record(error: BaseException) -> None:
    """Write the exception that ends the script to the error file, in the form of torch's `record`
    (torch/distributed/elastic/multiprocessing/errors/error_handler.py).

    What kills the process while the interpreter ends must not hide it. A file that is there
    already, torch's own, is left as it is.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")  # noqa: TID251 - torch's, of the script
    if not path or not isinstance(error, Exception):
        return
    import json
    from datetime import UTC, datetime
    from traceback import format_exception, format_exception_only

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    callstack = "".join(format_exception(type(error), error, trace))
    if len(callstack) > _CALLSTACK:
        callstack = f"{callstack[: _CALLSTACK // 2]}…{callstack[-_CALLSTACK // 2 :]}"
    said = "".join(format_exception_only(type(error), error)).strip()[:_CALLSTACK]
    more = {"py_callstack": callstack, "timestamp": str(int(datetime.now(UTC).timestamp()))}
    document = json.dumps({"message": {"message": said, "extraInfo": more}})
    try:
        with open(path, "x") as file:
            file.write(document)
    except OSError:
        return


def _hide_our_frames() -> None:
    """Let the interpreter report the exception that is under way without our frames."""
    report = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = report
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
            trace = trace.tb_next
        sys.last_traceback = trace
        report(kind, error.with_traceback(trace), trace)

    sys.excepthook = hook


def _show(command: list[str]) -> None:
    """Let ``ps`` and ``pkill -f`` see the script's command line, where it has room."""
    with open("/proc/self/stat", "rb") as stat:
        # From the state on (field 3); arg_start and arg_end are fields 48 and 49.
        fields = stat.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    words = b"".join(os.fsencode(part) + b"\0" for part in command)
    if len(words) <= end - start:
        try:
            with open("/proc/self/mem", "r+b", buffering=0) as memory:
                memory.seek(start)
                memory.write(words.ljust(end - start, b"\0"))
        except OSError:  # a process that may not be looked at, not even by itself
            return


# --- observation ---


def watch(record: str, installed: tuple[str, ...]) -> None:
    """Write what is imported from now on, and what the script does to ``os.environ``, to a file.

    A finder before the one that searches ``sys.path``: it costs nothing where nothing is imported
    (an audit hook does: torch's optimizers call ``id()``, which is audited), and no thread. The
    file is mapped, so that a killed worker's record is whole; each line is a tuple in Python's
    words: ``('import', name, origin)``, ``('env', key, value)``, ``('env', key, None)``. An import
    that failed is noted too: it will fail again.

    Args:
        record: a file of zeros, as large as the record may get.
        installed: folders of the standard library and of installed packages.
    """
    import _thread
    import ctypes
    from importlib.machinery import ModuleSpec, PathFinder

    # Not with the module mmap, whose objects keep a descriptor.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    fd = os.open(record, os.O_RDWR)
    size = os.fstat(fd).st_size
    start = libc.mmap(None, size, 3, 1, fd, 0)  # PROT_READ | PROT_WRITE, MAP_SHARED
    os.close(fd)
    if start == ctypes.c_void_p(-1).value:
        return
    at, copy = start, ctypes.memmove
    owner = os.getpid()
    one_at_a_time = _thread.allocate_lock()
    os.register_at_fork(after_in_child=one_at_a_time._at_fork_reinit)  # type: ignore[attr-defined]

    def note(*what: str | None) -> None:
        nonlocal at
        line = f"{what!a}\n".encode()
        with one_at_a_time:
            if os.getpid() == owner and at + len(line) < start + size:
                copy(at, line, len(line))
                at += len(line)

    class Finder:
        @staticmethod
        def find_spec(
            name: str, path: "Any" = None, target: ModuleType | None = None
        ) -> ModuleSpec | None:
            spec = PathFinder.find_spec(name, path, target)
            # Who only asks whether there is such a module comes from elsewhere.
            importing = sys._getframe(2).f_code.co_name == "_find_and_load_unlocked"
            if importing and spec is not None and spec.origin is not None:
                note("import", name, spec.origin)
            return spec

    def by_script() -> bool:
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.endswith(_NOT_THE_SETTER):
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
    place = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else 0
    sys.meta_path.insert(place, Finder)
