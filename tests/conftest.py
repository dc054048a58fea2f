"""Settings of all tests: for Hypothesis, a slow machine is not a failure."""

import os
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
    failed with a RecursionError. With ``HYPOTHESIS_PROFILE=nightly`` there are more examples.
    """
    from hypothesis import HealthCheck, settings

    slow = [HealthCheck.too_slow]
    examples = 1000 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 50
    settings.register_profile(
        "busy", deadline=None, suppress_health_check=slow, max_examples=examples
    )
    settings.load_profile("busy")
