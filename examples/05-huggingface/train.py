"""Train a small vision transformer on handwritten digits with Hugging Face's ``Trainer``.

The difference to a usual script is ``ElasticTrainer`` with its ``global_batch``. The weights are
random at the start, and the data comes with scikit-learn: nothing is downloaded.
"""

import argparse
import os
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainingArguments, ViTConfig, ViTForImageClassification

from dlrover_py.trainer import Checkpointer, session
from dlrover_py.trainer.integrations.huggingface import ElasticTrainer


def main() -> None:
    """Train the model, and print its accuracy on held-out samples."""
    args = parse_args()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    train, test = load()
    torch.manual_seed(1)
    model = ViTForImageClassification(
        ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            num_labels=10,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
        )
    )
    trainer = ElasticTrainer(
        model,
        TrainingArguments(
            "output",
            use_cpu=torch.cuda.device_count() < session.world().local_size,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=48,  # samples that a worker computes at once
            learning_rate=5e-3,
            warmup_steps=30,
            logging_steps=15,
            save_strategy="no",  # the checkpointer saves each step
            report_to="none",
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
            dataloader_num_workers=1,
        ),
        train_dataset=train,
        eval_dataset=test,
        compute_metrics=accuracy,
        callbacks=[Watch(args.step_delay)],
        global_batch=args.global_batch,
        checkpointer=Checkpointer(args.ckpt),
    )
    trainer.train()
    if not trainer.should_stop:
        found = trainer.evaluate()["eval_accuracy"]
        if trainer.is_world_process_zero():
            print(f"accuracy {found:.2f} after {trainer.state.epoch:.0f} epochs", flush=True)
    trainer.checkpointer.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--global-batch", type=int, default=96, help="samples, of all workers")
    parser.add_argument("--ckpt", help="folder that all nodes share; without it only in memory")
    parser.add_argument(
        "--step-delay", type=float, default=0.0, help="seconds, to have time to look"
    )
    return parser.parse_args()


class Digits(Dataset[dict[str, Any]]):
    """Images of 8 by 8 pixels, and what they show."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images = torch.from_numpy(images.astype(np.float32) / 16)[:, None]
        self.labels = torch.from_numpy(labels)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return an image and its label."""
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def load() -> tuple[Digits, Digits]:
    """Return 1,437 images for training and 360 for the test, which takes every fifth image."""
    digits = load_digits()
    test = np.arange(len(digits.target)) % 5 == 0
    return (
        Digits(digits.images[~test], digits.target[~test]),
        Digits(digits.images[test], digits.target[test]),
    )


def accuracy(found: Any) -> dict[str, float]:
    """Return how many of the predictions are right."""
    return {"accuracy": float((found.predictions.argmax(axis=1) == found.label_ids).mean())}


class Watch(TrainerCallback):  # type: ignore[misc]
    """Says where the training was resumed, and waits in each step."""

    def __init__(self, step_delay: float) -> None:
        self.step_delay = step_delay

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Print the step that was restored."""
        if state.global_step and state.is_world_process_zero:
            print(
                f"resumed after step {state.global_step}, in epoch {state.epoch:.2f}, "
                f"with {session.world().size} workers",
                flush=True,
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait."""
        time.sleep(self.step_delay)


if __name__ == "__main__":
    main()
