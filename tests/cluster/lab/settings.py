"""What the environment says, and where things lie. Nothing else here reads it."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent

NAME = os.environ.get("DLROVER_CLUSTER", "dlrover")
"""The cluster's name: another name is another cluster beside the first."""

NODES = int(os.environ.get("DLROVER_CLUSTER_NODES", "3"))

CACHE = Path(
    os.environ.get("DLROVER_CLUSTER_CACHE")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlrover-py" / "cluster"
)
"""What is built once and serves all clusters and all working trees."""

STATE = Path(os.environ.get("DLROVER_CLUSTER_STATE", "/var/tmp/dlrover-cluster"))
"""One folder in here is one cluster."""

KUBECONFIG = os.environ.get("KUBECONFIG", "")
"""An existing cluster to use; nothing is brought up then."""

KIND = os.environ.get("DLROVER_CLUSTER_KIND", "") == "1"
"""Take `kind`, which needs Docker, instead of nodes of our own."""

REQUIRED = os.environ.get("DLROVER_REQUIRE_CLUSTER", "") == "1"
"""A cluster that cannot be had is a failure (CI), not a reason to skip."""

PYTHON_IMAGE = os.environ.get("DLROVER_PYTHON_IMAGE", "")
"""Base of our images; without it one is made from Debian's packages."""
