"""Rank 1 fails under torch's decorator record, once rank 0 has ended. The FIFO "over" says so."""

import os

from torch.distributed.elastic.multiprocessing.errors import record


@record  # type: ignore[untyped-decorator]  # torch is not read
def main() -> None:
    # A worker that is killed while it imports may or may not be in the summary.
    if os.environ["RANK"] == "1":
        open("over").read()  # noqa: SIM115
        raise ValueError("nobody expects this")
    os.open("over", os.O_WRONLY)  # open until the process ends


main()
