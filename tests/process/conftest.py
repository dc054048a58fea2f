import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.harness import Place, eventually


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Folders for one test, and the check that nothing is left behind."""
    kept = request.node.get_closest_marker("kept_recipes") and request.getfixturevalue("kept")
    place = Place(whole_torch=request.node.get_closest_marker("whole_torch") is not None, kept=kept)
    try:
        yield place
    finally:
        place.close()


@pytest.fixture(scope="session")
def kept() -> Iterator[Path]:
    """A folder of the recipes that tests leave for others; see :class:`Place`."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def shm(place: Place) -> Iterator[Path]:
    """Where pools are; nothing may be left there."""
    folder = place.folder / "shm"
    folder.mkdir()
    place.env["DLROVER_SHM_DIR"] = str(folder)
    yield folder
    eventually(lambda: not list(folder.iterdir()), f"an empty {folder}")


@pytest.fixture(scope="session", autouse=True)
def _signals_as_on_a_terminal() -> None:
    """Who runs us in the background ignores SIGINT for all that we start, and so would they."""
    for number in (signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
