"""The trainer: what cannot be exact is refused; sums over labels and means over samples are."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer import Checkpointer
from dlrover_py.trainer.data import ElasticLoader, PerWorker
from dlrover_py.trainer.integrations.huggingface import (
    ElasticTrainer,
    TrainerProgress,
    _steps_left,
)

N, BATCH, STEPS = 53, 12, 5


class Points(Dataset[Any]):
    def __init__(self, length: int = N) -> None:
        self.read: list[int] = []
        """The samples that were read."""
        self.length = length
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(length, 5, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        return {"inputs": self.inputs[index], "labels": self.inputs[index].sum()[None].sin()}


class Mean(nn.Module):
    """Its loss is the mean over the samples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def forward(self, inputs: Any, labels: Any) -> dict[str, Any]:
        errors = (self.network(inputs) - labels) ** 2
        return {"loss": errors.mean(), "logits": errors}


class Careless(Mean):
    """It takes the number of labels, and ignores it."""

    def forward(self, inputs: Any, labels: Any, **_: Any) -> dict[str, Any]:
        return super().forward(inputs, labels)


class Sum(Mean):
    """Its loss is a sum that is divided by the number of labels."""

    def forward(
        self, inputs: Any, labels: Any, num_items_in_batch: Any = None, **_: Any
    ) -> dict[str, Any]:
        found = super().forward(inputs, labels)
        items = len(labels) if num_items_in_batch is None else num_items_in_batch
        return {"loss": found["logits"].sum() / items, "logits": found["logits"]}


class Routed(Sum):
    """Its loss has a second, small part, which is a mean over the samples of a batch."""

    def forward(
        self, inputs: Any, labels: Any, num_items_in_batch: Any = None, **_: Any
    ) -> dict[str, Any]:
        found = super().forward(inputs, labels, num_items_in_batch)
        balance = self.network[0](inputs).square().mean()
        return {**found, "loss": found["loss"] + 0.001 * balance}


class Odd(Mean):
    """Its loss depends on the number in a way of its own."""

    def forward(self, inputs: Any, labels: Any, num_items_in_batch: Any = 1, **_: Any) -> Any:
        found = super().forward(inputs, labels)
        return {"loss": found["loss"] / num_items_in_batch**2}


@contextmanager
def trainer(
    folder: Path, model: nn.Module, micro_batch: int = BATCH, **options: Any
) -> Iterator[ElasticTrainer]:
    """Provide a trainer that trains two epochs, and release its memory."""
    own = {name: options.pop(name, None) for name in ("callbacks", "checkpointer")}
    batch, length = options.pop("global_batch", BATCH), options.pop("length", N)
    arguments: dict[str, Any] = {
        "use_cpu": True,
        "num_train_epochs": 2,
        "per_device_train_batch_size": micro_batch,
        "learning_rate": 0.1,
        "optim": "sgd",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "logging_steps": 1,
        **options,
    }
    found = ElasticTrainer(
        model,
        TrainingArguments(str(folder), **arguments),
        train_dataset=Points(length),
        eval_dataset=Points(length),
        global_batch=batch,
        **own,
    )
    try:
        yield found
    finally:
        found.checkpointer.close()


def weights(model: nn.Module) -> list[float]:
    return [value for p in model.parameters() for value in p.flatten().tolist()]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Weights after two epochs of whole batches."""
    with trainer(tmp_path_factory.mktemp("expected"), Mean()) as one:
        one.train()
        assert (one.state.global_step, one.state.epoch) == (2 * STEPS, 2.0)
        assert len(one.state.log_history) == 2 * STEPS + 1
        return weights(one.model)


@pytest.mark.parametrize("kind", [Mean, Careless, Sum])
def test_micro_batches_do_not_change_the_steps(
    tmp_path: Path, expected: list[float], kind: type[Mean]
) -> None:
    with trainer(tmp_path, kind(), micro_batch=5) as one:
        one.train()
        assert weights(one.model) == pytest.approx(expected, rel=1e-12)


def test_the_logged_loss_is_that_of_the_step(tmp_path: Path) -> None:
    logs = []
    for micro_batch in (BATCH, 5):
        with trainer(tmp_path, Sum(), micro_batch) as one:
            one.train()
            logs.append([entry["loss"] for entry in one.state.log_history if "loss" in entry])
    assert logs[0] == pytest.approx(logs[1], rel=1e-6)


def test_a_loss_that_depends_otherwise_on_the_number_of_labels(tmp_path: Path) -> None:
    with trainer(tmp_path, Odd()) as one:
        with pytest.raises(ConfigError, match="neither independent of num_items_in_batch"):
            one.train()
        one.loss_is_scaled_for_ga = True


def test_a_worker_without_a_sample_adds_nothing(tmp_path: Path) -> None:
    """A step of 12 samples in a world of 16: four workers compute one without weight."""
    items, gradients = 0, []
    for rank in (0, 11, 12, 15):
        with trainer(tmp_path, Sum()) as one:
            one.loss_is_scaled_for_ga = True
            one.create_optimizer()
            steps = one.get_train_dataloader()
            steps.loader.sampler.rank, steps.loader.sampler.world = rank, 16
            (inputs,), count = one.get_batch_samples(iter(steps), 1, one.args.device)
            items += int(count or 0)
            loss = one.training_step(one.model, inputs, torch.tensor(BATCH))
            gradients.append([p.grad.abs().sum().item() for p in one.model.parameters()])
            assert (loss == 0) == (rank >= BATCH)
    assert items == 2
    assert all(gradients[0] + gradients[1])
    assert not any(gradients[2] + gradients[3])


class Tokens(Points):
    """Each sample has labels for some of its six tokens, and one sample has none."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        inputs = super().__getitem__(index)["inputs"]
        labels = (inputs.sum() + torch.arange(6)).sin().gt(0).long()
        return {"inputs": inputs, "labels": labels.where(torch.arange(6) < index % 7, -100)}


class Tagger(nn.Module):
    """Its loss is the mean over the labels of a batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Linear(5, 12).double()

    def forward(self, inputs: Any, labels: Any) -> dict[str, Any]:
        logits = self.network(inputs).view(-1, 2)
        return {"loss": nn.functional.cross_entropy(logits, labels.flatten()), "logits": logits}


class CarelessTagger(Tagger):
    """It takes the number of labels, and ignores it."""

    def forward(self, inputs: Any, labels: Any, **_: Any) -> dict[str, Any]:
        return super().forward(inputs, labels)


@pytest.mark.parametrize("kind", [Tagger, CarelessTagger])
def test_each_label_has_the_same_weight_whatever_its_micro_batch(
    tmp_path: Path, kind: type[Tagger]
) -> None:
    found = []
    for micro_batch in (BATCH, 5, 1):
        with trainer(tmp_path, kind(), micro_batch) as one:
            one.train_dataset = Tokens()
            one.train()
            losses = [entry["loss"] for entry in one.state.log_history if "loss" in entry]
            found.append(losses + weights(one.model))
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-6)


class Shifting(Tagger):
    """Each of its labels is that of the token before."""

    loss_type = "ForCausalLM"


class Spoken(Tagger):
    """It has several labels for each sample, and a mean over the samples."""

    config = SimpleNamespace(ctc_loss_reduction="mean")


def test_labels_are_counted_as_the_loss_counts_them(tmp_path: Path) -> None:
    labels = torch.tensor([[1, 2, -100], [3, -100, -100]])
    with trainer(tmp_path, Tagger()) as one:
        assert one.count_labels({"labels": labels}) == 3
        assert one.count_labels({"labels": labels.double()}) is None
        assert one.count_labels({"labels": [labels]}) is None
        assert one.count_labels([labels]) is None
    with trainer(tmp_path, Shifting()) as one:
        assert one.count_labels({"labels": labels}) == 1
        assert one.count_labels({"labels": labels, "shift_labels": labels}) == 3
    with trainer(tmp_path, Spoken()) as one:
        assert one.count_labels({"labels": labels}) is None


def test_a_small_part_of_the_loss_that_is_not_divided_is_seen(tmp_path: Path) -> None:
    found = []
    for micro_batch in (BATCH, 5, 1):
        with trainer(tmp_path, Routed(), micro_batch) as one:
            one.train()
            found.append(weights(one.model))
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-6)


class StopAt(TrainerCallback):
    """Ends the training after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


class FailAfter(TrainerCallback):
    """Ends the training as a failure does, before the step after a step is computed."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise InterruptedError


def test_a_checkpoint_of_the_trainer_is_continued(tmp_path: Path, expected: list[float]) -> None:
    with trainer(
        tmp_path, Mean(), save_strategy="steps", save_steps=7, callbacks=[StopAt(8)]
    ) as one:
        one.train()
        assert one.state.global_step == 8
    with trainer(tmp_path, Mean(), micro_batch=4) as one:
        one.train(resume_from_checkpoint=True)
        assert one.state.global_step == 2 * STEPS
        assert weights(one.model) == pytest.approx(expected, rel=1e-12)


def read_by(one: ElasticTrainer) -> list[int]:
    """Return the samples that a trainer has read, in their order."""
    dataset: Any = one.train_dataset
    return list(dataset.read)


@pytest.mark.parametrize("stored_by", ["trainer", "checkpointer"])
@pytest.mark.parametrize("batches", [(4, 8), (12, 5)])
def test_another_batch_continues_with_the_samples_that_are_left(
    tmp_path: Path, stored_by: str, batches: tuple[int, int]
) -> None:
    """Three steps, then another size of steps: each sample comes once in each of two epochs."""
    saving = {"save_strategy": "steps", "save_steps": 3} if stored_by == "trainer" else {}

    def checkpointer() -> Checkpointer | None:
        return None if saving else Checkpointer(tmp_path / "stored", persist_every=3)

    first: dict[str, Any] = {"global_batch": batches[0], "checkpointer": checkpointer(), **saving}
    with trainer(tmp_path, Mean(), callbacks=[FailAfter(3)], **first) as one:
        with pytest.raises(InterruptedError):
            one.train()
        rate = one.lr_scheduler.get_last_lr()[0]
        trained = read_by(one)[: 3 * batches[0]]
    options: dict[str, Any] = {"global_batch": batches[1], "checkpointer": checkpointer()}
    with trainer(tmp_path, Mean(), **options) as again:
        again.train(resume_from_checkpoint=True if saving else None)
        assert sorted(trained + read_by(again)) == sorted([*range(N)] * 2)
        left = -(-(N - len(trained)) // batches[1]) + -(-N // batches[1])
        assert again.state.global_step == again.state.max_steps == 3 + left
        rates = [entry["learning_rate"] for entry in again.state.log_history if "loss" in entry]
        assert rates[-left:] == pytest.approx([0.1 * n / (3 + left) for n in range(left, 0, -1)])
        assert 0 < rate < 0.1


@pytest.mark.parametrize("batches", [(4, 2), (2, 4)])
def test_max_steps_are_made_whatever_the_batch(tmp_path: Path, batches: tuple[int, int]) -> None:
    """Four of eight steps, then another size of steps: four more, and the training has ended."""
    first: dict[str, Any] = {"global_batch": batches[0], "length": 8, "max_steps": 8}
    first["checkpointer"] = Checkpointer(tmp_path / "stored", persist_every=4)
    with (
        trainer(tmp_path, Mean(), callbacks=[FailAfter(4)], **first) as one,
        pytest.raises(InterruptedError),
    ):
        one.train()
    options = {**first, "global_batch": batches[1]}
    for _ in "first", "again":
        options["checkpointer"] = Checkpointer(tmp_path / "stored")
        with trainer(tmp_path, Mean(), **options) as two:
            two.train()
            assert two.state.global_step == two.state.max_steps == 8
            assert not TrainerProgress(two).state_dict()["stopped_early"]


def test_a_part_of_an_epoch_has_as_many_steps_after_a_restart() -> None:
    """From any position on, the steps done and the steps left are those that Trainer counts."""
    for length in range(1, 41):
        loader = ElasticLoader(range(length), global_batch=1)
        for tenths in range(1, 60):
            epochs = tenths / 10
            planned = math.ceil(epochs * length)
            loader.sampler.epoch, loader.sampler.offset = 0, 0
            assert _steps_left(loader, epochs) == planned, (length, epochs)
            loader.sampler.epoch, loader.sampler.offset = divmod(planned - 1, length)
            assert _steps_left(loader, epochs) == 1, (length, epochs)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"data_seed": 2}, "made with seed=42"), ({"length": 60}, "samples were added or removed")],
)
def test_a_checkpoint_of_other_data_is_refused(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    with trainer(tmp_path, Mean(), callbacks=[StopAt(3)], **saving) as one:
        one.train()
    with trainer(tmp_path, Mean(), **options) as again:
        with pytest.raises(ConfigError, match=words):
            again.train(resume_from_checkpoint=True)
        assert not read_by(again)


def test_a_checkpoint_of_another_trainer_is_continued_at_the_end_of_an_epoch_only(
    tmp_path: Path,
) -> None:
    for step, outcome in ((3, "within an epoch"), (STEPS, None)):
        saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": step}
        folder = tmp_path / str(step)
        with trainer(folder, Mean(), callbacks=[StopAt(step)], **saving) as one:
            one.train()
        (folder / f"checkpoint-{step}" / "elastic_data.json").unlink()
        with trainer(folder, Mean()) as again:
            if outcome is None:
                again.train(resume_from_checkpoint=True)
                assert sorted(read_by(again)) == list(range(N))
            else:
                with pytest.raises(ConfigError, match=outcome):
                    again.train(resume_from_checkpoint=True)


class Counting(TrainerCallback, ExportableState):
    """A callback with a state of its own."""

    count = 0

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"count": self.count}}


def test_a_callback_gets_its_own_state_whatever_stands_before_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "eval_strategy": "epoch",
        "metric_for_best_model": "loss",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
    }
    patience = [EarlyStoppingCallback(early_stopping_patience=3) for _ in range(2)]
    with trainer(tmp_path, Mean(), callbacks=[patience[0]], **options) as one:
        patience[0].early_stopping_patience_counter = 2
        saved = TrainerProgress(one).state_dict()
    counting = Counting()
    with trainer(tmp_path, Mean(), callbacks=[counting, patience[1]], **options) as again:
        TrainerProgress(again).load_state_dict(saved)
        assert patience[1].early_stopping_patience_counter == 2
        assert not hasattr(counting, "early_stopping_patience_counter")


def test_the_state_of_the_trainer_is_part_of_the_checkpoint(tmp_path: Path) -> None:
    """Counts, the log, the best metric and callbacks go on; the end is an end again."""
    options: dict[str, Any] = {
        "eval_strategy": "epoch",
        "metric_for_best_model": "loss",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
    }
    patience = EarlyStoppingCallback(early_stopping_patience=3)
    with trainer(tmp_path, Mean(), callbacks=[StopAt(8), patience], **options) as one:
        one.train()
        patience.early_stopping_patience_counter = 2
        saved = TrainerProgress(one).state_dict()
    other = EarlyStoppingCallback(early_stopping_patience=3)
    with trainer(tmp_path, Mean(), callbacks=[StopAt(8), other], **options) as again:
        TrainerProgress(again).load_state_dict(saved)
        assert again.state.global_step == 8
        assert again.state.epoch == pytest.approx(1.6)
        assert again.state.log_history == one.state.log_history
        assert again.state.best_metric == one.state.best_metric is not None
        assert TrainerProgress(again).state_dict() == saved
        assert other.early_stopping_patience_counter == 2


def test_the_trainer_trains_once(tmp_path: Path) -> None:
    with trainer(tmp_path, Mean(), max_steps=2) as one:
        one.train()
        with pytest.raises(ConfigError, match=r"train\(\) was called before"):
            one.train()
        with pytest.raises(ConfigError, match="search of hyperparameters"):
            one.train(trial=object())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2: expected 1"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last=True: expected False, since each"),
        ({"train_sampling_strategy": "group_by_length"}, "expected 'random' or 'sequential'"),
        ({"auto_find_batch_size": True}, "choose per_device_train_batch_size"),
        ({"average_tokens_across_devices": False}, "the gradient depends on the world size"),
        ({"include_num_input_tokens_seen": True}, "not supported yet"),
        ({"torch_empty_cache_steps": 5}, "not supported yet"),
        ({"enable_jit_checkpoint": True}, "the checkpointer saves each step"),
        ({"ddp_static_graph": True}, "in the last micro-batch only"),
        ({"optim": "lomo"}, "makes its step after the last micro-batch"),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
            "accelerator_config.gradient_accumulation_kwargs={'sync_each_batch': True}",
        ),
    ],
)
def test_arguments_that_cannot_be_exact(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as error, trainer(tmp_path, Mean(), **options):
        pass
    assert words in str(error.value)


def test_a_batch_that_is_resized_with_the_world(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(ConfigError, match="counts epochs in steps of one size"):
        ElasticTrainer(Mean(), arguments, global_batch=PerWorker(4))  # type: ignore[arg-type]


def test_an_iterable_dataset(tmp_path: Path) -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(10))

    with trainer(tmp_path, Mean(), max_steps=2) as one:
        one.train_dataset = Stream()
        with pytest.raises(ConfigError, match="is a Stream: expected a map-style dataset"):
            one.train()
