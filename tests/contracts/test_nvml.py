"""The NVML of the tests has the names, parameters and numbers of the real library."""

import importlib
import inspect

import pytest

from tests.fakes_nvml import FakeNvml

pynvml = importlib.import_module("pynvml")  # it has no types
NAMES = sorted(name for name in vars(FakeNvml) if name.startswith(("nvml", "NVML_")))


@pytest.mark.parametrize("name", NAMES)
def test_the_library_has_it_alike(name: str) -> None:
    real, ours = getattr(pynvml, name), getattr(FakeNvml(), name)
    if callable(ours):
        assert [*inspect.signature(real).parameters] == [*inspect.signature(ours).parameters]
    elif name == "NVML_NVLINK_MAX_LINKS":
        assert real <= ours, "newer libraries know GPUs with more links"
    else:
        assert real == ours


def test_errors_have_their_number_and_events_their_device_and_data() -> None:
    error = pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
    assert isinstance(error, pynvml.NVMLError)
    assert error.value == pynvml.NVML_ERROR_TIMEOUT
    assert {"device", "eventData"} <= {*dir(pynvml.c_nvmlEventData_t())}


def test_the_use_of_a_gpu_has_the_fields_that_are_read() -> None:
    assert "gpu" in dir(pynvml.c_nvmlUtilization_t())
    assert {"used", "total"} <= {*dir(pynvml.c_nvmlMemory_t())}
