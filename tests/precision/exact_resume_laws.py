"""Run on every rank: ten steps of training, and the same ten with a checkpoint in the middle."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

from megatron_gdn.context_parallel import local_indices
from megatron_gdn.testing import digest
from tests.distributed.layer_laws import thd
from tests.parallel import parallel
from tests.precision.training import VOCABULARY, Training, build, load, save

LENGTHS = (8, 24, 16)
STEPS, MIDDLE = 10, 5


def train_step(training: Training, step: int, packed: bool) -> float:
    """One optimizer step over two micro-batches, each shared by the context-parallel ranks."""
    groups = parallel_state
    cp, rank = groups.get_context_parallel_world_size(), groups.get_context_parallel_rank()
    device = training.A_log.device
    held = local_indices(LENGTHS if packed else [sum(LENGTHS)], cp, rank).to(device)
    rows = torch.randint(
        0, VOCABULARY, (2, 1 if packed else 2, sum(LENGTHS) + 1),
        generator=torch.Generator().manual_seed(step),
    ).to(device)  # fmt: skip

    def forward_step(batches, model):
        batch = next(batches)
        losses = model(
            batch[:, :-1][:, held],
            held.expand(len(batch), -1),
            None,
            labels=batch[:, 1:][:, held],
            packed_seq_params=thd(LENGTHS, device) if packed else None,
        )

        def loss_function(losses):
            total = losses.float().sum()
            count = torch.tensor(losses.numel(), dtype=torch.int, device=device)
            return total, count, total.detach()

        return losses, loss_function

    training.ddp.zero_grad_buffer()
    training.optimizer.zero_grad()
    totals = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(rows),
        model=[training.ddp],
        num_microbatches=2,
        seq_length=sum(LENGTHS),
        micro_batch_size=rows.shape[1],
        forward_only=False,
    )
    training.optimizer.step()
    total = torch.stack(totals).sum()
    dist.all_reduce(total, group=groups.get_context_parallel_group())
    return total.item()


def bits(training: Training) -> dict[str, str]:
    """sha256 of every weight, fp32 master and optimizer moment that this rank holds."""
    found = {name: digest(p) for name, p in training.model.named_parameters()}
    inner = training.megatron_optimizer.optimizer
    for group, settings in enumerate(inner.param_groups):
        for index, master in enumerate(settings["params"]):
            place = f"optimizer {group}.{index}"
            found[f"{place} master"] = digest(master)
            for name, value in inner.state[master].items():
                found[f"{place} {name}"] = digest(torch.as_tensor(value))
    return found


def train(kind: str, tp: int, cp: int, packed: bool, folder: str | None, sizes: dict):
    """Losses of ten steps and the bits at their end; through a checkpoint if given a folder.

    Everything runs under torch's switch, which raises at an op without a fixed order.
    """
    options = {"tp": tp, "context_parallel_size": cp, "deterministic_mode": True, **sizes}
    torch.use_deterministic_algorithms(True)
    try:
        with parallel(tp=tp, cp=cp):
            training = build(kind, **options)
            first = MIDDLE if folder else STEPS
            losses = [train_step(training, step, packed) for step in range(first)]
            if folder:
                save(training, folder)
                training = build(kind, **options, seed=99)
                load(training, folder)
                losses += [train_step(training, step, packed) for step in range(MIDDLE, STEPS)]
            return losses, bits(training)
    finally:
        torch.use_deterministic_algorithms(False)
