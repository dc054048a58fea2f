"""Makes Python's collector of cycles rare. ``setup.sh`` puts it into developers' environments.

Half of the processor time of the tests is Python that imports torch and soon ends. A third of that
went to the collector, most of it to its last run over all modules, at the end, when the memory is
given back anyway. So what is imported is left out of that run. Triton is not: it writes a list of
leaks to standard error if its classes are not collected.
"""

import atexit
import gc
import sys


class _BeforeTriton:
    """Watches imports, and finds nothing itself."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Leave out all that is imported so far, if Triton is imported now."""
        if name == "triton":
            atexit.unregister(gc.freeze)
            gc.freeze()


gc.set_threshold(50_000, 20, 100)
atexit.register(gc.freeze)
sys.meta_path.insert(0, _BeforeTriton)
