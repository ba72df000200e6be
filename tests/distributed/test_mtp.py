"""Heads of multi-token prediction of M, G and * layers: every layout takes the same
steps."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_gdn import tree_packed_seq_params
from megatron_gdn.context_parallel import local_indices
from megatron_gdn.specs import hybrid_stack_spec
from tests.distributed.layer_laws import thd
from tests.distributed.model_laws import leaves, metadata
from tests.parallel import (
    VOCABULARY,
    assert_close,
    group_of_one,
    hybrid_model,
    in_ddp,
    model_config,
    parallel,
    run_schedule,
)
from tests.ranks import on_ranks

MAIN = "M*G-"
HEAD = "M*"
DEPTHS = 2
LENGTHS = (24, 40)  # 12 and 20 times two ranks
TOKENS = sum(LENGTHS)


def build_model(tp=1, cp=1, sequence_parallel=False, **options) -> HybridModel:
    ranks = {"tensor_model_parallel_size": tp, "context_parallel_size": cp}
    heads = {"mtp_num_layers": DEPTHS, "mtp_loss_scaling_factor": 1.0}
    config = model_config(MAIN, sequence_parallel=sequence_parallel, **ranks, **heads)
    pattern = "/".join([MAIN, *[HEAD] * DEPTHS])
    spec = hybrid_stack_spec("local", **options)
    return hybrid_model(config, pattern, spec, position_embedding_type="rope")


def save(folder: str) -> set[str]:
    """A model's initial weights, for every layout to load; the keys they are stored
    under."""
    with parallel():
        state = build_model().sharded_state_dict(metadata=metadata())
        dist_checkpointing.save(state, folder)
        return {leaf.key for leaf in leaves(state) if hasattr(leaf, "key")}


def _micro_batches(
    kind: str,
) -> list[tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]]:
    """Tokens ``[B, S + 1]``, loss mask ``[B, S]`` and document lengths of every
    micro-batch.

    Megatron weighs a head's loss by the ratio of a rank's masked-in tokens before and
    after the shift. Where the first tokens of a document, one per head, are masked out,
    that is 1 on every rank and for every document.
    """
    made = torch.Generator().manual_seed(11)
    documents = [torch.randint(VOCABULARY, (1, n + 1), generator=made) for n in LENGTHS]
    masks = [(torch.arange(n) >= DEPTHS)[None].float() for n in LENGTHS]
    if kind == "alone":
        return [(x, m, (n,)) for x, m, n in zip(documents, masks, LENGTHS, strict=True)]
    if kind == "packed":
        inputs = torch.cat([x[:, :-1] for x in documents], 1)
        labels = torch.cat([x[:, 1:] for x in documents], 1)
        return [(torch.stack([inputs, labels], 2), torch.cat(masks, 1), LENGTHS)]
    rows = torch.randint(VOCABULARY, (2, TOKENS + 1), generator=made)
    return [(rows, (torch.arange(TOKENS) >= DEPTHS).float().expand(2, -1), (TOKENS,))]


def trained(
    folder: str, kind: str, tp=1, cp=1, sequence_parallel=False, steps=2, **options
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of some steps of gradient descent, and every gradient of the first (its
    square, if tensor-parallel ranks share it)."""
    with parallel(tp=tp, cp=cp):
        model = build_model(tp, cp, sequence_parallel, **options)
        model.load_state_dict(
            dist_checkpointing.load(
                model.sharded_state_dict(metadata=metadata()), folder
            )
        )
        ddp = in_ddp(model)
        model.config.finalize_model_grads_func = finalize_model_grads
        batches = _micro_batches(kind)
        rank = parallel_state.get_context_parallel_rank()

        def forward_step(batches, model):
            rows, mask, lengths = next(batches)
            tokens, labels = (
                rows.unbind(2) if rows.dim() == 3 else (rows[:, :-1], rows[:, 1:])
            )
            held = local_indices(lengths, cp, rank)
            mask = mask[:, held]
            losses = model(
                tokens[:, held],
                held.expand(len(tokens), -1),
                None,
                labels=labels[:, held],
                loss_mask=mask,
                packed_seq_params=thd(lengths) if kind == "packed" else None,
            )

            def loss_function(losses):
                total = (losses.float() * mask).sum()
                count = mask.sum().int()
                return (
                    total,
                    count,
                    {"loss": torch.stack([total.detach(), count.float()])},
                )

            return losses, loss_function

        losses = []
        first = {}
        for _ in range(steps):
            ddp.zero_grad_buffer()
            reports = run_schedule(ddp, batches, forward_step, TOKENS)
            total = torch.stack([r["loss"] for r in reports]).sum(0)
            dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
            losses.append((total[0] / total[1]).item())
            first = first or {n: _whole(p) for n, p in model.named_parameters()}
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.3 * parameter.main_grad)
        return losses, first


def _whole(parameter) -> torch.Tensor:
    if not getattr(parameter, "tensor_model_parallel", False):
        return parameter.main_grad.clone()
    group = parallel_state.get_tensor_model_parallel_group()
    square = parameter.main_grad.double().square().sum()
    dist.all_reduce(square, group=group)
    return parameter.main_grad.clone() if group.size() == 1 else square


@pytest.fixture(scope="module")
def weights(pools, tmp_path_factory):
    """A folder with the weights that every run begins with."""
    folder = str(tmp_path_factory.mktemp("weights"))
    keys = pools(1).run(save, folder)[0]
    head = "mtp.layers.1.mtp_model_layer.layers"
    assert {  # as Megatron names them over Transformer Engine
        "mtp.layers.1.enorm.weight",
        "mtp.layers.1.eh_proj.weight",
        "mtp.layers.1.final_layernorm.weight",
        f"{head}.0.mixer.in_proj.weight.dt",
        f"{head}.0.mixer.in_proj.layer_norm_weight",
        f"{head}.1.self_attention.linear_qkv.layer_norm_weight",
    } <= keys
    return folder


@pytest.fixture(scope="module")
def one_rank(pools, weights):
    """Losses and gradients of one rank, by kind of batch."""
    return {
        kind: pools(1).run(trained, weights, kind)[0]
        for kind in ("batch", "packed", "alone")
    }


def assert_same(found, expected) -> None:
    """fp32 through eight layers, in another order of sums over at most 128 tokens."""
    assert found[0] == pytest.approx(expected[0], rel=2e-5)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert gradient.abs().max() > 0, name
        got = found[1][name]
        if got.dim() == 0:  # the square of what tensor-parallel ranks share
            gradient = gradient.double().square().sum()
        assert_close(name, got, gradient, 1e-4)


def test_a_model_with_heads_learns(one_rank):
    for losses, _ in one_rank.values():
        assert losses[-1] < losses[0] - 0.01


def test_packed_documents_train_heads_as_documents_alone(one_rank):
    """No token of a head sees, and no label is, a token of another document."""
    assert_same(one_rank["packed"], one_rank["alone"])


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("packed", "chunkwise"),
        pytest.param("batch", "headwise", marks=pytest.mark.slow),
        pytest.param("packed", "headwise", marks=pytest.mark.nightly),
        pytest.param("batch", "chunkwise", marks=pytest.mark.nightly),
    ],
)
def test_two_context_parallel_ranks_equal_one(pools, weights, one_rank, kind, mode):
    for found in pools(2).run(trained, weights, kind, cp=2, linear_cp_mode=mode):
        assert_same(found, one_rank[kind])


def test_two_tensor_parallel_ranks_load_the_checkpoint_and_equal_one(
    pools, weights, one_rank
):
    for found in pools(2).run(trained, weights, "packed", tp=2, sequence_parallel=True):
        assert_same(found, one_rank["packed"])


@on_ranks(2)
def test_what_megatron_would_shift_wrongly_is_refused():
    """By every rank, in words."""
    refused = partial(pytest.raises, (ValueError, NotImplementedError))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    given = {"labels": tokens, "loss_mask": torch.ones(1, 8)}
    with parallel(cp=2):
        for layout in ("contiguous", "zigzag_buffer"):
            with refused(match=f"cp_layout='{layout}' over 2 ranks"):
                build_model(cp=2, cp_layout=layout)
        model = build_model(cp=2)
        padded = thd((8, 8), real_lengths=(5, 8))
        with refused(match="with padded slots"):
            model(tokens, tokens, None, packed_seq_params=padded)
        packed = thd((8,))
        packed.cp_group = group_of_one()
        packed.local_cp_size = 1
        with refused(
            match="(?s)group of 1 ranks.*group of 2|group of 2.*group of 1 ranks"
        ):
            model(tokens, tokens, None, packed_seq_params=packed, **given)
    with parallel():
        model = build_model(cp_layout="contiguous")  # one rank has all tokens in order
        same = thd((4, 4), real_lengths=(4, 4))  # slots as long as their documents
        loss = model(tokens, tokens, None, packed_seq_params=same, **given)
        assert loss.isfinite().all()
        # A prompt of 3 tokens with two responses: its last token has two successors.
        tree = tree_packed_seq_params((3, 3, 2), (-1, 0, 0), device="cpu")
        with refused(match="qkv_format='thd_tree'"):
            model(tokens, tokens, None, packed_seq_params=tree, **given)
