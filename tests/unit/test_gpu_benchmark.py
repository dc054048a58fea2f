"""The rows of benchmarks/gpu.py: phases that add up."""

from benchmarks.gpu import PHASES, rows_of, table


def sample(scale: float) -> dict[str, float]:
    found = {phase: scale * (number + 1) for number, phase in enumerate(PHASES)}
    return found | {"all": sum(found.values())}


def test_the_whole_stands_first_beside_the_others_and_then_its_phases() -> None:
    samples = {"elastic-run": [sample(1), sample(3)], "torchrun": [{"all": 50.0}]}
    whole, *phases = rows_of(samples, "2 workers")
    assert (whole["ours"], whole["peers"], whole["n"]) == (
        {"min": 28.0, "median": 56.0, "max": 84.0},
        {"torchrun": 50.0},
        2,
    )
    assert [row["what"] for row in phases] == [f"… of it {phase}" for phase in PHASES]
    assert sum(row["ours"]["min"] for row in phases) == whole["ours"]["min"]
    assert "| kill → next step | 28.000 / 56.000 / 84.000 s (n=2) | torchrun: 50.00 s |" in table(
        [whole, *phases]
    )
