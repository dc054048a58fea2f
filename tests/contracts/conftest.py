"""A real API server for all contracts that speak of one; it is started once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kube_server import api_server, programs


@pytest.fixture(scope="session")
def kube_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A kubeconfig of its administrator."""
    found = programs()
    if isinstance(found, str):
        pytest.skip(found)
    with api_server(tmp_path_factory.mktemp("kube-api"), *found) as kubeconfig:
        yield kubeconfig
