"""A short campaign of random faults (tests/cluster/chaos), with workers that start in a moment."""

import pytest

from tests.cluster.chaos.campaign import campaign
from tests.cluster.chaos.plan import plan
from tests.cluster.harness import Cluster

FAULTS, SEED = 8, 3


@pytest.mark.timeout(900)
def test_random_faults_violate_nothing(cluster: Cluster, operator: str) -> None:
    cluster.image("agent")
    with campaign(cluster, operator, fast=True) as its:
        report = its.run(plan(SEED, FAULTS), SEED)
        if not report.violations:
            its.finish()
            report.violations += its.shared.take()
    assert not report.violations, "\n".join(report.stories)
    assert len(report.outcomes) == FAULTS
    assert report.checks > 100
    assert report.goodput["gpt0"] > 0
