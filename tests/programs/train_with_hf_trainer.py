"""Trains a small network with transformers' ``Trainer``, as :mod:`tests.exact_runs` demands.

The loss is the mean over the labels that are not -100, so a step has as many items as its samples
have such labels, and some micro-batches have none.
"""

import os
from typing import Any

# If DeepSpeed is installed, transformers imports it, and it looks for accelerators.
os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch.distributed as dist
from exact_task import GLOBAL_BATCH, Points, Record, network  # type: ignore[import-not-found]
from torch import nn
from transformers import TrainingArguments

from dlrover_py.trainer.integrations.huggingface import ElasticTrainer


class Regression(nn.Module):  # type: ignore[misc]
    """Returns the mean of squared errors over the labels of a whole optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(
        self, inputs: Any, labels: Any, number: Any, num_items_in_batch: Any = None, **_: Any
    ) -> dict[str, Any]:
        counted = labels != -100
        errors = ((self.network(inputs) - labels) ** 2).where(counted, 0.0).sum()
        items = counted.sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": errors / items}


class Recorder(ElasticTrainer):
    """Writes down what is trained."""

    record: Any

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        seen = [n for part, b in inputs for n in b["number"].tolist()[: part.samples]]
        self.record.trained(self.state.global_step + 1, int(self.state.epoch or 0), seen)
        return loss


def collate(samples: list[Any]) -> dict[str, Any]:
    numbers, inputs, targets = zip(*samples, strict=True)
    labels = torch.stack(targets)
    number = torch.tensor(numbers)
    return {
        "number": number,
        "inputs": torch.stack(inputs),
        "labels": labels.where((number % 3 != 0)[:, None], -100.0),
    }


def main() -> None:
    record = Record()
    torch.set_num_threads(1)
    arguments = TrainingArguments(
        str(record.folder / "output"),
        use_cpu=True,
        num_train_epochs=record.epochs,
        per_device_train_batch_size=3,
        learning_rate=0.02,
        warmup_steps=5,
        optim="sgd",
        optim_args="momentum=0.9",
        max_grad_norm=0.5,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_num_workers=2,
        ddp_find_unused_parameters=False,
    )
    trainer = Recorder(
        Regression(),
        arguments,
        collate,
        Points(),
        global_batch=GLOBAL_BATCH,
        seed_samples=True,
        ledger=record.folder / "ledger",
    )
    trainer.record = record
    trainer.train()
    trainer.checkpointer.close()
    if not trainer.should_stop:
        record.finished(trainer.model)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
