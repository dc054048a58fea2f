"""Claims a checkpoint directory, and ends: python claim_directory.py FOLDER [shared]."""

import sys

from dlrover_py.checkpoint.directory import CheckpointDirectory, DirectoryOwner

directory = CheckpointDirectory(sys.argv[1])
directory.acquire_lease(DirectoryOwner("u2", "bert"), "b1", shared="shared" in sys.argv)
