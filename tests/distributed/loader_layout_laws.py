"""Run on every rank: models that are told by the loader or the launch how documents were cut."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_batch_on_this_cp_rank

from megatron_gdn import SequenceLayout
from megatron_gdn.context_parallel import local_indices
from megatron_gdn.specs import hybrid_stack_spec
from tests.distributed.layer_laws import thd
from tests.parallel import assert_close, group_of_one, make_config, parallel

BUFFER = "--dataloader-inter-document-masking"
LENGTHS = (8, 24, 16)  # multiples of 2 cp: every layout can cut them
VOCABULARY = 32


@contextmanager
def launched_with(*flags: str) -> Iterator[None]:
    """Megatron's arguments, as its scripts set them before they build a model."""
    from megatron.training import arguments, global_vars

    with patch.object(sys, "argv", ["pretrain_hybrid.py", *flags]):
        args = arguments.parse_args()
    with patch.object(global_vars, "_GLOBAL_ARGS", args):
        yield


def build_model(cp: int = 2, pattern: str = "MG*-", **options) -> HybridModel:
    """Over the ranks' context-parallel group, or on one rank of it."""
    changes = options.pop("config", {})
    config = make_config(
        num_layers=len(pattern), mtp_num_layers=pattern.count("/") or None,
        context_parallel_size=cp, ffn_hidden_size=32,
        attention_dropout=0.0, hidden_dropout=0.0,
    )  # fmt: skip
    vars(config).update(changes)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    if cp == 1:
        groups.cp = group_of_one()
    return HybridModel(
        config, hybrid_stack_spec("local", **options), VOCABULARY, 64,
        hybrid_layer_pattern=pattern, share_embeddings_and_output_weights=False,
        position_embedding_type="rope", pg_collection=groups,
    )  # fmt: skip


def cut_by_megatron(positions: torch.Tensor) -> torch.Tensor:
    """What Megatron's get_batch gives this rank where it cuts the whole buffer."""
    batch = get_batch_on_this_cp_rank(
        {"tokens": positions[None], "cu_seqlens": torch.tensor([[0, len(positions)]])},
        is_hybrid_cp=False,
        cp_group=parallel_state.get_context_parallel_group(),
        use_per_sequence_balancing=True,
    )
    return batch["tokens"][0]


def require_one_ranks_gradients(model, one, held, packed, tolerance: float = 1e-4) -> None:
    """Losses and every gradient of ``model`` over the ranks' tokens ``held`` are those of ``one``.

    fp32 through three mixers and a softmax over the vocabulary, sums of up to 48 tokens in another
    order.
    """
    tokens = torch.arange(sum(LENGTHS) + 1).square().remainder(VOCABULARY)[None]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    weight = torch.linspace(0.5, 1.5, sum(LENGTHS))[None]

    def run(model, held, packed):
        model.zero_grad()
        inputs, labels = tokens[:, :-1][:, held], tokens[:, 1:][:, held]
        loss = model(inputs, positions[:, held], None, labels=labels, packed_seq_params=packed)
        (loss * weight[:, held]).sum().backward()
        return loss.detach()

    expected = run(one, torch.arange(sum(LENGTHS)), None if packed is None else thd(LENGTHS))
    found = run(model, held, packed)
    assert_close("loss", found, expected[:, held], tolerance)
    for name, parameter in model.named_parameters():
        grad = parameter.grad.clone()
        if len(held) < sum(LENGTHS):
            dist.all_reduce(grad, group=parallel_state.get_context_parallel_group())
        theirs = one.get_parameter(name).grad
        assert theirs.abs().max() > 0, name
        assert_close(name, grad, theirs, tolerance)


def told(flags: tuple[str, ...], cut: str, mode: str | None = None, **options) -> None:
    """A model under this launch, over documents that were cut so, equals one rank.

    Args:
        mode: ``cp_partition_mode`` of the PackedSeqParams, if its class has none.
    """
    with parallel(cp=2), launched_with(*flags):
        one, model = build_model(cp=1), build_model(cp=2, **options)
        model.load_state_dict(one.state_dict())
        rank = parallel_state.get_context_parallel_rank()
        held = local_indices(LENGTHS, 2, rank, SequenceLayout.parse(cut))
        if BUFFER in flags and "--sft" not in flags:
            assert torch.equal(held, cut_by_megatron(torch.arange(sum(LENGTHS))))
        packed = thd(LENGTHS)
        if mode is not None:
            packed.cp_partition_mode = mode
        require_one_ranks_gradients(model, one, held, packed)


def micro_batches_differ() -> None:
    """One model takes micro-batches in turn that were cut differently."""
    with parallel(cp=2):
        one, model = build_model(cp=1), build_model(cp=2)
        model.load_state_dict(one.state_dict())
        rank = parallel_state.get_context_parallel_rank()
        for mode, cut in (
            (None, "zigzag"), ("contiguous", "contiguous"), ("zigzag", "zigzag"),
            ("zigzag_buffer", "zigzag_buffer"), ("contiguous", "contiguous"),
        ):  # fmt: skip
            packed = thd(LENGTHS)
            packed.cp_partition_mode = mode
            held = local_indices(LENGTHS, 2, rank, SequenceLayout.parse(cut))
            require_one_ranks_gradients(model, one, held, packed)


def refused(cases: dict[str, dict]) -> list[tuple[str, str]]:
    """What is said to each case where sources contradict each other; "" if nothing is."""
    with parallel(cp=2):
        return [(case, _refused(pattern, **given)) for case, (pattern, given) in cases.items()]


def _refused(pattern: str, flags: tuple = (), mode: str | None = None, **options) -> str:
    packed = thd(LENGTHS)
    if mode is not None:
        packed.cp_partition_mode = mode
    tokens = torch.zeros(1, sum(LENGTHS) // 2, dtype=torch.long)
    given = {"labels": tokens, "loss_mask": torch.ones_like(tokens), "packed_seq_params": packed}
    with launched_with(*flags):
        try:
            build_model(pattern=pattern, **options)(tokens, tokens, None, **given)
        except ValueError as error:
            return str(error)
    return ""
