from collections.abc import Iterator

import pytest

from tests.process.harness import Place


@pytest.fixture
def place() -> Iterator[Place]:
    """Folders for one test, and the check that nothing is left behind."""
    place = Place()
    try:
        yield place
    finally:
        place.close()
