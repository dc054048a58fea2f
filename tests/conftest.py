"""Settings of all tests: for Hypothesis, a slow machine is not a failure."""

from functools import cache
from pathlib import Path


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Load the settings before a module that uses Hypothesis. The others do without its import."""
    if "hypothesis" in module_path.read_text():
        load_settings()


@cache
def load_settings() -> None:
    """Load the settings of Hypothesis once.

    A profile has the one that was loaded before as its parent. With a hundred parents, some tests
    failed with a RecursionError.
    """
    from hypothesis import HealthCheck, settings

    slow = [HealthCheck.too_slow]
    settings.register_profile("busy", deadline=None, suppress_health_check=slow)
    settings.load_profile("busy")
