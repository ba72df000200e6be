"""Run on every rank: ten steps of training, and the same ten with a checkpoint in the
middle."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from benchmarks.lib.repeats import digest
from megatron_gdn.compat.one_process import (
    resume_distributed_optimizer_with_torch_adam,
    use_torch_norm_after_the_last_hybrid_layer,
)
from megatron_gdn.context_parallel import local_indices
from tests.distributed.layer_laws import thd
from tests.parallel import VOCABULARY, parallel, run_schedule
from tests.precision.training import Training, build_model, load, save, summed, wrap

LENGTHS = (8, 24, 16)
STEPS = 10
MIDDLE = 5


def train_step(
    training: Training, step: int, lengths: tuple[int, ...], packed: bool
) -> float:
    """One optimizer step over two micro-batches, each shared by the context-parallel
    ranks."""
    groups = parallel_state
    cp = groups.get_context_parallel_world_size()
    rank = groups.get_context_parallel_rank()
    device = training.A_log.device
    held = local_indices(lengths if packed else [sum(lengths)], cp, rank).to(device)
    rows = torch.randint(
        0,
        VOCABULARY,
        (2, 1 if packed else 2, sum(lengths) + 1),
        generator=torch.Generator().manual_seed(step),
    ).to(device)

    def forward_step(batches, model):
        batch = next(batches)
        losses = model(
            batch[:, :-1][:, held],
            held.expand(len(batch), -1),
            None,
            labels=batch[:, 1:][:, held],
            packed_seq_params=thd(lengths, device) if packed else None,
        )
        return losses, summed

    training.ddp.zero_grad_buffer()
    training.optimizer.zero_grad()
    totals = run_schedule(training.ddp, rows, forward_step, sum(lengths), rows.shape[1])
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


def start(kind: str, options: dict) -> Training:
    # on GPUs without Transformer Engine too
    use_torch_norm_after_the_last_hybrid_layer()
    resume_distributed_optimizer_with_torch_adam()
    model = build_model(**options)
    return wrap(kind, model.cuda() if torch.cuda.is_available() else model)


def train(
    kind: str,
    tp: int,
    cp: int,
    mode: str,
    packed: bool,
    folder: str | None,
    lengths: tuple[int, ...] = LENGTHS,
    **sizes: int | bool,
) -> dict:
    """Losses of ten steps and the bits at their end; through a checkpoint if given a
    folder."""
    options = {
        "tp": tp,
        "context_parallel_size": cp,
        "deterministic_mode": True,
        "spec_options": {"linear_cp_mode": mode},
        **sizes,
    }
    torch.use_deterministic_algorithms(True)
    try:
        with parallel(tp=tp, cp=cp):
            training = start(kind, options)
            first = MIDDLE if folder else STEPS
            losses = [
                train_step(training, step, lengths, packed) for step in range(first)
            ]
            if folder:
                save(training, folder)
                training = start(kind, {**options, "seed": 99})
                load(training, folder)
                rest = range(MIDDLE, STEPS)
                losses += [train_step(training, step, lengths, packed) for step in rest]
            layer = training.model.decoder.layers[0].self_attention
            return {"losses": losses, "bits": bits(training), "backend": layer.backend}
    finally:
        torch.use_deterministic_algorithms(False)


def assert_same_run(whole: list[dict], resumed: list[dict]) -> None:
    for rank, (one, other) in enumerate(zip(whole, resumed, strict=True)):
        assert one["losses"] == other["losses"] and len(set(one["losses"])) == STEPS
        assert one["bits"] == other["bits"], rank
        assert sum("exp_avg_sq" in name for name in one["bits"]) > 10
