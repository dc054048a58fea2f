"""DLRover-Py: elastic, fault-tolerant PyTorch training.

The package holds the protocol that all programs share, the master, the trainer SDK and the
``dlrover`` command. The agent (``elastic-run``) lives in :mod:`dlrover_agent`.
"""

__version__ = "0.1.0"
