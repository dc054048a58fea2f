"""The rendezvous backend for an unmodified torchrun: ``--rdzv-backend=dlrover``."""
