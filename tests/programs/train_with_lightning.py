"""Trains a small network with Lightning, as :mod:`tests.exact_runs` demands."""

from typing import Any

import lightning as L
import torch
from exact_task import GLOBAL_BATCH, Points, Record, network  # type: ignore[import-not-found]
from torch.nn.functional import mse_loss

from dlrover_py.trainer import Checkpointer
from dlrover_py.trainer.data import ElasticLoader
from dlrover_py.trainer.integrations.lightning import ElasticStrategy


class Task(L.LightningModule):  # type: ignore[misc]
    def __init__(self, record: Record, loader: ElasticLoader) -> None:
        super().__init__()
        self.network = network()
        self.record, self.loader = record, loader
        self.seen: list[int] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        samples, inputs, targets = batch
        self.seen += samples.tolist()[: self.trainer.strategy.micro_batch.samples]
        return mse_loss(self.network(inputs), targets)

    def on_train_batch_end(self, *_: object) -> None:
        self.record.trained(self.global_step, self.current_epoch, self.seen)
        self.seen.clear()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    record = Record()
    torch.set_num_threads(1)
    loader = ElasticLoader(
        Points(),
        global_batch=GLOBAL_BATCH,
        micro_batch=3,
        seed=3,
        seed_samples=True,
        ledger=record.folder / "ledger",
        num_workers=2,
    )
    model = Task(record, loader)
    trainer = L.Trainer(
        max_epochs=record.epochs,
        accelerator="cpu",
        strategy=ElasticStrategy(Checkpointer()),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(model, loader)
    record.finished(model.network)


if __name__ == "__main__":
    main()
