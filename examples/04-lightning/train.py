"""Classify handwritten digits with PyTorch Lightning, whatever fails.

Two lines make it elastic: ``ElasticLoader`` deals the samples, and ``ElasticStrategy`` trains them.
"""

import argparse
import os
import time

import lightning as L
import numpy as np
import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from dlrover_py.trainer import Checkpointer
from dlrover_py.trainer.data import ElasticLoader
from dlrover_py.trainer.integrations.lightning import ElasticStrategy


class Digits(L.LightningModule):
    """A small network; it knows nothing of workers, failures and checkpoints."""

    def __init__(self, step_delay: float) -> None:
        """Create the network.

        Args:
            step_delay: seconds to wait in each step.
        """
        super().__init__()
        torch.manual_seed(1)
        self.network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.step_delay = step_delay

    def on_train_start(self) -> None:
        """Say where the training begins."""
        self.print(
            f"training from step {self.global_step}, in epoch {self.current_epoch}, "
            f"with {self.trainer.world_size} workers",
            flush=True,
        )

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of a micro-batch."""
        inputs, labels = batch
        return cross_entropy(self.network(inputs), labels)

    def on_train_batch_end(self, *_: object) -> None:
        """Wait, so that there is time to look."""
        time.sleep(self.step_delay)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Log the accuracy on held-out samples."""
        inputs, labels = batch
        right = self.network(inputs).argmax(dim=1) == labels
        self.log("accuracy", right.float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    """Train the model, and print its accuracy."""
    args = parse_args()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    train, test = load()
    loader = ElasticLoader(
        train, global_batch=args.global_batch, micro_batch=16, ledger=args.ledger, num_workers=1
    )
    trainer = L.Trainer(
        max_epochs=args.epochs,
        strategy=ElasticStrategy(Checkpointer(args.ckpt)),
        use_distributed_sampler=False,  # each worker validates all samples: the same at any size
        check_val_every_n_epoch=args.epochs,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(Digits(args.step_delay), loader, DataLoader(test, batch_size=len(test)))
    if trainer.is_global_zero and "accuracy" in trainer.callback_metrics:
        accuracy = trainer.callback_metrics["accuracy"]
        print(f"accuracy {accuracy:.2f} after {trainer.current_epoch} epochs", flush=True)


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--global-batch", type=int, default=96, help="samples, of all workers")
    parser.add_argument("--ckpt", help="folder that all nodes share; without it only in memory")
    parser.add_argument("--ledger", help="shared folder for a record of the samples of each step")
    parser.add_argument(
        "--step-delay", type=float, default=0.0, help="seconds, to have time to look"
    )
    return parser.parse_args()


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,437 samples for training and 360 for the test, which takes every fifth sample."""
    digits = load_digits()
    inputs = torch.from_numpy(digits.data.astype(np.float32) / 16)
    labels = torch.from_numpy(digits.target)
    test = torch.arange(len(inputs)) % 5 == 0
    return TensorDataset(inputs[~test], labels[~test]), TensorDataset(inputs[test], labels[test])


if __name__ == "__main__":
    main()
