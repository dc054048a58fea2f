"""Imports torch's compiler when it is needed. ``setup.sh`` puts this into developers' environments.

The variable ``TESTS_LATE_TORCH=1`` switches it on for a process.

Nearly half of the processor time of the tests is Python that imports torch. Of no use to a program
that compiles nothing is ``torch._dynamo``, the compiler, which takes as much again as torch. The
first call of a function that it must not trace would import it, as in each optimizer. Nothing can
be traced before it is imported, so such calls do without it. DistributedDataParallel asks it for a
setting, which has its default. Once the compiler is imported, all is as in torch.

DeepSpeed marks functions that shall be compiled, or shall not, when it is imported. That waits for
their first call. Lightning imports the compiler to recognise its modules, of which there are none
before it is imported.

A third of what is left of ``import torch`` are two modules that are loaded when they are used:
``torch.export``, and ``torch._meta_registrations``, kernels in Python for tensors without data. The
first ``FakeTensorMode`` uses them. Before that, an operator of a tensor of the device ``meta``
raises NotImplementedError where it needs such a kernel. Without a GPU, the libraries that ask for
its driver are not imported.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

Function = Callable[..., Any]
COMPILER = "torch._dynamo"
RECOGNISE = b"from torch._dynamo import OptimizedModule\n"
RECOGNISING = ("lightning.fabric.wrappers", "lightning.pytorch.utilities.compile")
"""Modules that import the compiler with this line only to recognise what it has compiled."""
KERNELS = "torch._meta_registrations"
LATE = (KERNELS, "torch.export")
"""Modules that are loaded when an attribute of them is used."""
OF_A_GPU = () if os.path.exists("/dev/nvidiactl") else ("cuda.bindings", "pynvml")
"""Modules that torch does without. They ask for a driver that is not there."""


def _late(mark: Function, plain: Callable[[Function], Function]) -> Function:
    """Return a decorator that is torch's, and for calls before the import of the compiler another.

    Args:
        mark: decorator of torch, which may be called with options instead of a function.
        plain: what it would do without a compiler.
    """

    def decorator(fn: Function | None = None, *args: Any, **options: Any) -> Function:
        if fn is None:
            return functools.partial(decorator, *args, **options)
        marked, unmarked = mark(fn, *args, **options), plain(fn)

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (marked if COMPILER in sys.modules else unmarked)(*args, **kwargs)

        return call

    return decorator


def _with_own_grad_mode(step: Function) -> Function:
    """Return the step of an optimizer with gradients on or off, as the optimizer says."""

    def call(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        torch = importlib.import_module("torch")
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return step(optimizer, *args, **kwargs)

    return call


class _Recognising(type):
    """Type of a class that has the instances of the compiler's class of the same name."""

    def __instancecheck__(cls, instance: object) -> bool:
        compiler = sys.modules.get(COMPILER)
        return compiler is not None and isinstance(instance, getattr(compiler, cls.__name__))


class OptimizedModule(metaclass=_Recognising):
    """Stands for the compiler's class of modules, of which there are none without it."""


class _Edited(SourceFileLoader):
    """Loads a module with the line :data:`RECOGNISE` without that, and keeps no compiled file."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        own = b"from %s import OptimizedModule\n" % __name__.encode()
        return self.source_to_code(self.get_data(path).replace(RECOGNISE, own), path)


class _Changed(SourceFileLoader):
    """Loads a module, and changes it before anybody sees it."""

    def __init__(self, name: str, path: str, change: Callable[[ModuleType], None]) -> None:
        super().__init__(name, path)
        self._change = change

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self._change(module)


class _LateModule(ModuleType):
    """A module that is loaded when an attribute is used that Python does not ask each module for.

    ``importlib.util.LazyLoader`` loads it for those, too, and ``inspect`` asks all modules.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__class__ = ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None
        assert isinstance(self.__spec__.loader, _LateLoader)
        self.__spec__.loader.real.exec_module(self)
        return getattr(self, name)


class _LateLoader(Loader):
    """Does not load its module; :class:`_LateModule` does, with the real loader."""

    def __init__(self, real: Loader) -> None:
        self.real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _LateModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Load only what the kernels are made of: without that, torch has no generators."""
        if module.__name__ == KERNELS:
            importlib.import_module("torch._prims")


def _load_kernels() -> None:
    """Load the kernels in Python, if that has not happened yet."""
    if isinstance(kernels := sys.modules.get(KERNELS), _LateModule):
        kernels.activate_meta  # noqa: B018  its use loads the module


class _Finder:
    """Finds modules of torch where Python would."""

    def __init__(self) -> None:
        self._changes: dict[str, Callable[[ModuleType], None]] = {
            "torch.compiler": self._compile_late,
            "torch._compile": self._mark_late,
            "torch.optim.optimizer": self._step_late,
            "torch.nn.parallel.distributed": self._ask_late,
            "torch._subclasses.fake_tensor": self._have_kernels,
        }

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module that is loaded in another way than others; None for the others.

        Raises:
            ModuleNotFoundError: the module asks for a GPU, and there is none.
        """
        if name in OF_A_GPU:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name not in (*self._changes, *RECOGNISING, *LATE):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.origin is not None and spec.loader is not None:
            if name in LATE:
                spec.loader = _LateLoader(spec.loader)
            elif name in RECOGNISING:
                spec.loader = _Edited(name, spec.origin)
            else:
                spec.loader = _Changed(name, spec.origin, self._changes[name])
        return spec

    @staticmethod
    def _compile_late(module: ModuleType) -> None:
        torch = sys.modules["torch"]
        compile_now, disable_now = torch.compile, module.disable

        @functools.wraps(compile_now)
        def compile(model: Any = None, **options: Any) -> Any:
            if not isinstance(model, FunctionType):
                return compile_now(model, **options)
            compiled = functools.cache(lambda: compile_now(model, **options))

            @functools.wraps(model)
            def call(*args: Any, **kwargs: Any) -> Any:
                return compiled()(*args, **kwargs)

            return call

        @functools.wraps(disable_now)
        def disable(fn: Any = None, *args: Any, **options: Any) -> Any:
            if fn is not None and not isinstance(fn, FunctionType):
                return disable_now(fn, *args, **options)
            return late_disable(fn, *args, **options)

        def disable_at_call(fn: Function, *args: Any, **options: Any) -> Function:
            disabled = functools.cache(lambda: disable_now(fn, *args, **options))
            return lambda *given, **named: disabled()(*given, **named)

        late_disable = _late(disable_at_call, lambda fn: fn)
        vars(torch)["compile"], vars(module)["disable"] = compile, disable

    @staticmethod
    def _mark_late(module: ModuleType) -> None:
        vars(module)["_disable_dynamo"] = _late(module._disable_dynamo, lambda fn: fn)

    @staticmethod
    def _step_late(module: ModuleType) -> None:
        mark = module._use_grad_for_differentiable
        vars(module)["_use_grad_for_differentiable"] = _late(mark, _with_own_grad_mode)

    @staticmethod
    def _have_kernels(module: ModuleType) -> None:
        make = module.FakeTensorMode.__init__

        @functools.wraps(make)
        def __init__(mode: Any, *args: Any, **kwargs: Any) -> None:
            _load_kernels()
            make(mode, *args, **kwargs)

        module.FakeTensorMode.__init__ = __init__

    @staticmethod
    def _ask_late(module: ModuleType) -> None:
        torch, make = module.torch, module.DistributedDataParallel.__init__
        default = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")
        answers = SimpleNamespace(utils=default)

        @functools.wraps(make)
        def __init__(ddp: Any, *args: Any, **kwargs: Any) -> None:
            if COMPILER not in sys.modules:
                torch._dynamo = answers
            try:
                make(ddp, *args, **kwargs)
            finally:
                if vars(torch).get("_dynamo") is answers:
                    del torch._dynamo

        module.DistributedDataParallel.__init__ = __init__


sys.meta_path.insert(0, _Finder())
