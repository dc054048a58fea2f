"""Fails under torch's decorator record."""

from torch.distributed.elastic.multiprocessing.errors import record


@record  # type: ignore[untyped-decorator]  # torch is not read
def main() -> None:
    raise OSError("no such shard")


main()
