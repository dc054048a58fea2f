"""CUDA_VISIBLE_DEVICES is read as torch reads it."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch.cuda import _parse_visible_devices, _transform_uuid_to_ordinals

from dlrover_agent.visible_devices import count, of_job, one_for_each, visible
from dlrover_py.protocol.errors import ConfigError

UUIDS = [f"GPU-{i:08x}-0000-0000-0000-000000000000" for i in range(4)]
WORDS = st.one_of(
    st.integers(-2, 6).map(str),
    st.sampled_from([*UUIDS, "GPU-00000001", "GPU-0000", "GPU-ffff", "GPU-", "MIG-a", "MIG-b"]),
    st.sampled_from(["", " 1", "+2", "1gpu", "junk", "NoDevFiles", "0 1", "1;2", "00"]),
)


def of_torch(given: str) -> tuple[list[int], int]:
    """Indices, and the count, by torch's own parser."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", given)
        found = _parse_visible_devices()
    if found and isinstance(found[0], str):
        if found[0].startswith("MIG-"):
            return [], 1
        return (found := _transform_uuid_to_ordinals(found, UUIDS)), len(found)
    chosen: list[int] = []
    for index in found:
        if int(index) >= len(UUIDS):
            break
        chosen.append(int(index))
    return chosen, len(chosen)


@given(st.lists(WORDS, max_size=4).map(",".join))
@example("NoDevFiles")
@example("0,1,junk,3")
@example("MIG-a,MIG-b")
@example(f"0,{UUIDS[1]}")
@example(f"{UUIDS[1]},0")
def test_as_torch(text: str) -> None:
    indices, number = of_torch(text)
    assert count(text, UUIDS) == number
    if not text.startswith("MIG-"):
        assert visible(text, UUIDS) == indices


def test_each_worker_sees_its_own_gpu() -> None:
    def seen(**environ: str) -> list[dict[str, str]]:
        return one_for_each({f"{name}_VISIBLE_DEVICES": v for name, v in environ.items()}, 2)

    both = [{"CUDA_VISIBLE_DEVICES": gpu, "HIP_VISIBLE_DEVICES": gpu} for gpu in ("4", "6")]
    assert seen() == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    assert seen(CUDA="3, 5,7") == [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "5"}]
    assert seen(CUDA="3,5", HIP="4,6") == both, "HIP_VISIBLE_DEVICES comes first"
    assert seen(CUDA="3,5", HIP="") == seen(CUDA="3,5"), "an empty one does not count"
    with pytest.raises(ConfigError, match="with 2 workers and HIP_VISIBLE_DEVICES='4': expected"):
        seen(CUDA="3,5", HIP="4")


def test_where_no_uuid_is_known_names_are_counted() -> None:
    assert count("GPU-a,GPU-b", ["", ""]) == 2
    assert visible("GPU-a", ["", ""]) is None
    assert count("0,7", []) == 2, "it is not known which GPUs there are"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ("", [0, 1, 2, 3]),
        ("CUDA=1,3", [1, 3]),
        ("CUDA=3,1", [1, 3]),
        ("CUDA=GPU-00000002", [2]),
        ("CUDA=", []),
        ("CUDA=NoDevFiles", []),
        ("CUDA=MIG-a", []),
        ("NVIDIA=all", [0, 1, 2, 3]),
        ("NVIDIA=void", [0, 1, 2, 3]),  # CDI has chosen them
        (f"NVIDIA={UUIDS[1]},{UUIDS[3]}", [1, 3]),  # a privileged container sees all GPUs
        ("NVIDIA=1,2", [1, 2]),
        ("NVIDIA=4,5,6,7", [0, 1, 2, 3]),  # their numbers on the host; the container has its own
        ("NVIDIA=GPU-another", []),
        ("NVIDIA=MIG-a", []),
        ("NVIDIA=0:1", []),
        (f"NVIDIA={UUIDS[1]},{UUIDS[3]} CUDA=0,1", [1]),
    ],
)
def test_a_job_uses_what_its_variables_name(environ: str, expected: list[int]) -> None:
    pairs = (word.split("=") for word in environ.split())
    given = {f"{name}_VISIBLE_DEVICES": value for name, value in pairs}
    assert of_job(given, UUIDS, ["H100"] * 4) == expected


def test_numbers_of_unlike_gpus_say_nothing_without_their_order() -> None:
    models = ["T4", "A100", "T4", "A100"]
    given = {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert of_job(given, UUIDS, models) == []
    assert of_job({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, UUIDS, models) == [0, 1, 2, 3]
    assert of_job({"CUDA_VISIBLE_DEVICES": UUIDS[1]}, UUIDS, models) == [1]
    assert of_job({**given, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, UUIDS, models) == [0, 1]
    assert of_job(given, [*UUIDS[:3], ""], ["T4", "T4", "T4", ""]) == [0, 1], "one is lost"
