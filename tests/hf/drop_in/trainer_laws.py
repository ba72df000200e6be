"""Trainer over context-parallel ranks against a plain loop on one rank."""

import copy
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import IterableDataset

from tests.hf.tiny_models import build

# Before transformers' Trainer imports the model classes with the kernels of fla.
MODEL = build("Qwen3_5ForCausalLM").double()

from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from megatron_gdn.hf import ContextParallelTrainerMixin, PackingCollator, patch  # noqa: E402
from tests.parallel import assert_close  # noqa: E402

LENGTHS = (5, 1, 9, 4, 7, 3, 8, 2, 6, 11, 3, 5, 9, 2, 4, 6, 10, 1, 7, 3, 5, 8, 2, 4)
DOCUMENTS = 3
ACCUMULATED = 2
RATE = 1e-3
STEPS = 2


class CPTrainer(ContextParallelTrainerMixin, Trainer):
    pass


class Record(TrainerCallback):
    def __init__(self) -> None:
        self.gradients = []
        self.losses = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs) -> None:
        self.gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))


def texts() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(5)
    drawn = (
        torch.randint(67, (length,), generator=generator).tolist() for length in LENGTHS
    )
    return [{"input_ids": ids} for ids in drawn]


def summed_loss(model, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    labels = batch["shift_labels"]
    told = {k: v for k, v in batch.items() if k not in ("labels", "shift_labels")}
    logits = model(**told, use_cache=False).logits.float()  # as transformers' own loss
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss, labels.ge(0).sum()


def plain_loop(model, batches: list[dict], at_once: int):
    patch(model, unpacked="fused")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        parts = [
            summed_loss(model, b)
            for b in batches[step * at_once : (step + 1) * at_once]
        ]
        loss = sum(part for part, _ in parts) / sum(count for _, count in parts)
        loss.backward()
        yield loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()


def refuse_what_goes_wrong(trainer: CPTrainer, documents: list) -> None:
    """Each would train on something else without a word."""

    def again(model=trainer.model, loss_only=True, **changes) -> CPTrainer:
        args = copy.copy(trainer.args)
        args.prediction_loss_only = loss_only
        given = {
            "train_dataset": documents,
            "data_collator": trainer.data_collator,
        } | changes
        return CPTrainer(model, args, eval_dataset=documents, **given)

    def train(**changes) -> None:
        again(**changes).train()

    def evaluate_first() -> None:
        late = again(model=copy.deepcopy(trainer.model))
        late.evaluate()
        late.train()

    def a_mean_of_what_it_sees() -> None:
        late = again()
        late.model_accepts_loss_kwargs = False
        late.train()

    def without_the_mixin() -> None:
        Trainer(
            copy.deepcopy(trainer.model),
            copy.copy(trainer.args),
            train_dataset=documents,
            data_collator=trainer.data_collator,
        ).train()

    class Streamed(IterableDataset):
        def __iter__(self):
            return iter(documents)

    smooth = {"compute_loss_func": lambda *args, **kwargs: None}
    unshifted = {
        "data_collator": lambda rows: {
            k: v for k, v in trainer.data_collator(rows).items() if k != "shift_labels"
        }
    }
    for call, error, message in (
        (without_the_mixin, ValueError, "must have shares of one batch"),
        (a_mean_of_what_it_sees, ValueError, "accepts_loss_kwargs = True"),
        (evaluate_first, RuntimeError, "evaluate.. ran before train"),
        (
            lambda: train(train_dataset=Streamed()),
            ValueError,
            "__len__ and __getitem__",
        ),
        (
            lambda: train(**smooth),
            ValueError,
            "compute_loss_func with context parallelism",
        ),
        (lambda: train(**unshifted), ValueError, "no shift_labels"),
        (lambda: again(model=copy.deepcopy(MODEL)).train(), ValueError, "hf.patch"),
        (
            lambda: again(loss_only=False).predict(documents),
            NotImplementedError,
            "its share of",
        ),
    ):
        with pytest.raises(error, match=message):
            call()


def compare_with_a_plain_loop(replicas: int) -> None:
    record = Record()
    folder = tempfile.mkdtemp()
    settings = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        save_strategy="no",
        optim="sgd",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        per_device_train_batch_size=DOCUMENTS,
        per_device_eval_batch_size=DOCUMENTS,
        gradient_accumulation_steps=ACCUMULATED,
        train_sampling_strategy="sequential",
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        dataloader_pin_memory=False,
        prediction_loss_only=True,
        disable_tqdm=True,
    )
    device = settings.device
    shape = (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "cp"))["cp"]
    many = copy.deepcopy(MODEL)
    one = copy.deepcopy(MODEL)
    patch(many, mesh, attention="gathered", cp_layout="contiguous")
    collate = PackingCollator(pad_to_multiple_of=2 * mesh.size())
    documents = texts()
    trainer = CPTrainer(
        many,
        settings,
        train_dataset=documents,
        eval_dataset=documents[:12],
        data_collator=collate,
        callbacks=[record],
    )
    batches = [
        collate(documents[i : i + DOCUMENTS])
        for i in range(0, len(documents), DOCUMENTS)
    ]
    trainer.train()
    assert len(record.gradients) == STEPS
    truth = plain_loop(one, batches, ACCUMULATED * replicas)
    for loss, gradients, (true_loss, truths) in zip(
        record.losses, record.gradients, truth, strict=True
    ):
        # logged rounded
        assert abs(loss - true_loss) < 1e-4 * true_loss, (loss, true_loss)
        assert gradients.keys() == truths.keys()
        for name, gradient in truths.items():
            assert_close(name, gradients[name], gradient, 1e-5)
    for (name, ours), theirs in zip(
        many.named_parameters(), one.parameters(), strict=True
    ):
        assert_close(name, ours, theirs, 1e-5)
    with torch.no_grad():
        parts = [summed_loss(one, batch) for batch in batches[:4]]
    # What is evaluated together: a batch of every replica.
    together = [parts[i : i + replicas] for i in range(0, 4, replicas)]
    means = [
        sum(part for part, _ in of) / sum(count for _, count in of) for of in together
    ]
    mean = sum(means) / len(means)
    assert abs(trainer.evaluate()["eval_loss"] - mean) < 1e-5 * mean
    refuse_what_goes_wrong(trainer, documents)
