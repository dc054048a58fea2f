"""Conformance of exact data with torch alone: a training with faults is as one without.

The cases happen one after the other in one job of each integration: a start of a framework costs
more than a case. At the end, the samples of each step, the ledger and the weights must be those of
a run that nothing has disturbed. Equal weights after equal steps mean equal losses.
``test_exact_frameworks.py`` does the same with other frameworks.
"""

import pytest

from tests import exact_runs
from tests.exact_runs import PLAIN, Integration, References
from tests.process.harness import Place

AS_PLAIN = "as with plain PyTorch: only the optimizer has another state, which other cases restore"
TABLE = {
    "plain PyTorch": Integration(PLAIN),
    "ElasticLoop": Integration("train_with_elastic_loop.py", reference=PLAIN),
    "FSDP2": Integration("train_with_fsdp2.py", same_files=("scaler.json",)),
    "ZeroRedundancyOptimizer": Integration(
        "train_with_zero_optimizer.py",
        without=dict.fromkeys(("killed prefetching worker", "torn checkpoint"), AS_PLAIN),
    ),
}
"""The integrations. Each has all cases of ``exact_runs.CASES`` but those that it names."""


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """The runs without faults."""
    return References(tmp_path_factory.mktemp("references"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TABLE)
def test_a_training_with_faults_is_as_one_without(
    place: Place, references: References, name: str
) -> None:
    exact_runs.compare_with_faults(place, references, TABLE[name])
