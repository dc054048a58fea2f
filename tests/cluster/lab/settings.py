"""Settings from the environment, and paths. No other module of the lab reads the environment."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent

NAME = os.environ.get("DLROVER_CLUSTER", "dlrover")
"""Name of the cluster. Clusters with other names can run at the same time."""

NODES = int(os.environ.get("DLROVER_CLUSTER_NODES", "3"))

CACHE = Path(
    os.environ.get("DLROVER_CLUSTER_CACHE")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlrover-py" / "cluster"
)
"""Folder of built programs and images, which all clusters and working trees share."""

STATE = Path(os.environ.get("DLROVER_CLUSTER_STATE", "/var/tmp/dlrover-cluster"))
"""Folder that has one folder for each cluster."""

KUBECONFIG = os.environ.get("KUBECONFIG", "")
"""Kubeconfig of an existing cluster to use; empty to start one."""

KIND = os.environ.get("DLROVER_CLUSTER_KIND", "") == "1"
"""Whether to use `kind`, which needs Docker, instead of the lab."""

REQUIRED = os.environ.get("DLROVER_REQUIRE_CLUSTER", "") == "1"
"""Whether tests fail without a cluster (CI), instead of being skipped."""

PYTHON_IMAGE = os.environ.get("DLROVER_PYTHON_IMAGE", "")
"""Base of the images. If empty, one is made from Debian's packages."""
