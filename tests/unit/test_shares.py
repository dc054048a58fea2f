"""The samples of a step among ranks and micro-batches."""

from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.trainer.data.shares import count_micro_batches, micro_batches


@given(
    start=st.integers(0, 10**6),
    total=st.integers(1, 300),
    world=st.integers(1, 40),
    limit=st.none() | st.integers(1, 50),
)
def test_each_position_belongs_to_one_micro_batch_of_one_rank(
    start: int, total: int, world: int, limit: int | None
) -> None:
    dealt = [
        micro_batches(start, start + total, rank=rank, world=world, limit=limit)
        for rank in range(world)
    ]
    positions = [at for rank in dealt for batch in rank for at in range(batch.start, batch.stop)]
    assert positions == list(range(start, start + total))

    assert {len(rank) for rank in dealt} == {count_micro_batches(total, world, limit)}
    assert all(
        [batch.last for batch in rank] == [False] * (len(rank) - 1) + [True] for rank in dealt
    )

    sizes = [sum(batch.samples for batch in rank) for rank in dealt]
    assert max(sizes) - min(sizes) <= 1
    for rank in dealt:
        parts = [batch.samples for batch in rank]
        assert max(parts) - min(parts) <= 1
        assert limit is None or max(parts) <= limit
        for batch in rank:
            assert list(batch.positions), "an empty micro-batch computes a sample of its step"
            assert all(start <= at < start + total for at in batch.positions)
