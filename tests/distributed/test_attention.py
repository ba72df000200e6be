"""Plain-torch attention equals a direct softmax, alone and in parallel, in every
layout.

fp32 on gloo against fp64, largest difference over largest entry at most 1e-5: about 80
units of rounding, for sums over at most a few hundred terms.
"""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import build_module
from torch import nn

from megatron_gdn import SequenceLayout, tree_packed_seq_params
from megatron_gdn.context_parallel import local_indices
from megatron_gdn.mixers.attention import (
    TorchAttention,
    class_with_tree_attention,
)
from megatron_gdn.specs.layer import local_attention_spec
from tests.distributed.gpt_laws import build_model
from tests.distributed.layer_laws import (
    forward_backward,
    randomise_,
    require_same_bits,
    thd,
)
from tests.distributed.mixer_laws import Mixers, parallel_equals_one_rank
from tests.other_defaults import by_both_defaults
from tests.parallel import (
    alone,
    assert_close,
    group_of_one,
    groups_of_megatron,
    make_config,
    parallel,
)
from tests.ranks import on_ranks
from tests.trees import Tree, random_tree

UNEQUAL = (8, 24, 16, 8)  # multiples of 2 * cp for cp = 2 and 4
ANY_LENGTH = (3, 0, 29, 7, 1)
layouts = pytest.mark.parametrize("layout", ["zigzag", "zigzag_buffer", "contiguous"])
ranks = pytest.mark.parametrize(
    ("tp", "cp", "sp"),
    [(1, 2, False), (1, 4, False), (2, 2, True)],
    ids=["cp2", "cp4", "tp2-cp2"],
)
ONE_RANK = {"batch": None, "packed": ANY_LENGTH, "tree": random_tree(9, multiple=2)}
options = pytest.mark.parametrize(
    "options",
    [
        {"num_query_groups": 1},
        {"num_query_groups": 4},
        {"qk_layernorm": True},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    ],
    ids=str,
)
HIDDEN = 24
HEADS = 4
HEAD_SIZE = 6
TOLERANCE = 1e-5


def attention_config(**changes):
    settings = {
        "num_attention_heads": HEADS,
        "num_query_groups": 2,
        "kv_channels": HEAD_SIZE,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
    }
    return make_config(**{**settings, **changes})


def build_attention(config, groups, rope=None, cp_layout="zigzag", linear_cp_mode=None):
    """Called as mixers are where ``rope`` says whether Megatron's angles are given."""
    spec = local_attention_spec(qk_layernorm=config.qk_layernorm, cp_layout=cp_layout)
    layer = build_module(spec, config, layer_number=1, pg_collection=groups)
    if rope is not None:
        layer.forward = partial(_turned, layer.forward, config, groups, rope)
    return layer


def _turned(forward, config, groups, rope, x, mask=None, packed_seq_params=None):
    tokens = (
        len(x)
        * groups.cp.size()
        * (groups.tp.size() if config.sequence_parallel else 1)
    )
    longest = tokens if packed_seq_params is None else packed_seq_params.max_seqlen_q
    # Megatron's models cut the angles of a tree for ranks, as those of a batch.
    packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
    rotary = RotaryEmbedding(
        HEAD_SIZE, 1.0, use_cpu_initialization=True, cp_group=groups.cp
    )
    angles = rotary(longest, packed_seq=packed) if rope else None
    return forward(x, mask, rotary_pos_emb=angles, packed_seq_params=packed_seq_params)


def share_of(name: str, whole: torch.Tensor, layer) -> torch.Tensor:
    dim = {"linear_qkv.weight": 0, "linear_proj.weight": 1}.get(name)
    tp = layer.pg_collection.tp
    return whole if dim is None else whole.chunk(tp.size(), dim)[tp.rank()]


ATTENTION = Mixers(
    attention_config, build_attention, randomise_, share_of, TOLERANCE, ()
)


def direct_softmax(
    x, weights, groups: int, tree: Tree, rope: bool, qk_norm_eps: float | None
):
    """The layer's formula on the whole buffer ``[S, B, D]``, written out; in the dtype
    of x.

    ``tree`` are the documents of a packed buffer, or one: a batch.
    """
    shared_by = HEADS // groups
    qkv = (x @ weights["linear_qkv.weight"].T).unflatten(
        -1, (groups, shared_by + 2, HEAD_SIZE)
    )
    q, k, v = qkv.split([shared_by, 1, 1], dim=-2)
    q = q.flatten(2, 3)
    k, v = (t.expand(*t.shape[:3], shared_by, HEAD_SIZE).flatten(2, 3) for t in (k, v))

    def norm(t, weight):
        return t * (t.square().mean(-1, keepdim=True) + qk_norm_eps).rsqrt() * weight

    if qk_norm_eps is not None:
        q, k = (
            norm(q, weights["q_layernorm.weight"]),
            norm(k, weights["k_layernorm.weight"]),
        )
    seen = torch.zeros(len(x), len(x), dtype=torch.bool)
    position = torch.zeros(len(x), dtype=x.dtype)
    for index, slot in enumerate(tree.slots):
        start = sum(tree.slots[:index])
        before = [
            token for each in tree.path(index)[:-1] for token in tree.tokens(each)
        ]
        rows = slice(start, start + slot)
        seen[rows, rows] = torch.ones(slot, slot, dtype=torch.bool).tril()
        seen[rows, before] = True
        position[rows] = torch.arange(len(before), len(before) + slot, dtype=x.dtype)
    if rope:
        frequency = 10000 ** -(torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE).to(x.dtype)
        angle = (position[:, None] * frequency).repeat(1, 2)[:, None, None]

        def rotate(t):
            first, second = t.chunk(2, -1)
            return t * angle.cos() + torch.cat((-second, first), -1) * angle.sin()

        q, k = rotate(q), rotate(k)
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) / HEAD_SIZE**0.5
    probabilities = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    out = torch.einsum("bhst,tbhd->sbhd", probabilities, v).flatten(2)
    return out @ weights["linear_proj.weight"].T


def equals_a_direct_softmax(lengths, rope: bool = True, **changes) -> None:
    """Output, input gradient and every parameter's gradient, on one rank."""
    tree = Tree((-1,), (48,))
    packed = None
    if lengths is not None:
        tree = (
            lengths
            if isinstance(lengths, Tree)
            else Tree((-1,) * len(lengths), lengths)
        )
        packed = tree.params if isinstance(lengths, Tree) else thd(lengths)
    config = attention_config(**changes)
    layer = ATTENTION.whole(config, rope=rope)
    whole = {
        name: p.detach().double().requires_grad_()
        for name, p in layer.named_parameters()
    }
    x, weight = (torch.randn(sum(tree.slots), 1 if packed else 2, HIDDEN) for _ in "xw")
    exact = x.double().requires_grad_()
    eps = config.layernorm_epsilon if config.qk_layernorm else None
    y = direct_softmax(exact, whole, config.num_query_groups, tree, rope, eps)
    (y * weight).sum().backward()
    found = forward_backward(layer, x, packed, weight=weight)
    assert_close("output", found.pop("output"), y, TOLERANCE)
    assert_close("input gradient", found.pop("input"), exact.grad, TOLERANCE)
    for name, gradient in found.items():
        assert whole[name].grad.abs().max() > 0, f"{name}: no gradient to compare"
        assert_close(f"gradient of {name}", gradient, whole[name].grad, TOLERANCE)


def build_core(
    config, groups, layout: str, mask_type=AttnMaskType.causal
) -> TorchAttention:
    return TorchAttention(
        config, 1, mask_type, "self", pg_collection=groups, cp_layout=layout
    )


@pytest.mark.parametrize("rope", [True, False], ids=["rope", "no rope"])
@pytest.mark.parametrize("lengths", ONE_RANK.values(), ids=ONE_RANK)
@on_ranks(1)
def test_one_rank_equals_a_direct_softmax(lengths, rope):
    with parallel():
        equals_a_direct_softmax(lengths, rope)


@options
@pytest.mark.parametrize("lengths", [None, UNEQUAL], ids=["batch", "packed"])
@on_ranks(1)
def test_head_counts_norms_and_recomputation_equal_a_direct_softmax(options, lengths):
    with parallel():
        equals_a_direct_softmax(lengths, **options)


@options
@pytest.mark.parametrize("lengths", [None, UNEQUAL], ids=["batch", "packed"])
def test_head_counts_norms_and_recomputation_in_parallel_equal_one_rank(
    pools, options, lengths
):
    given = {"lengths": lengths, "changes": options, "rope": True}
    pools(4).run(parallel_equals_one_rank, ATTENTION, 2, 2, True, **given)


@pytest.mark.parametrize("lengths", [None, UNEQUAL], ids=["batch", "packed"])
def test_without_angles_in_parallel_equals_one_rank(pools, lengths):
    pools(4).run(
        parallel_equals_one_rank, ATTENTION, 2, 2, True, lengths=lengths, rope=False
    )


@pytest.mark.each_pair
@layouts
@ranks
@pytest.mark.parametrize("of", ["batch", "packed", "tree"])
def test_attention_in_parallel_equals_one_rank(pools, of, tp, cp, sp, layout):
    """Documents of a tree continue others, with padding in their slots."""
    given = {
        "batch": {},
        "packed": {"lengths": UNEQUAL if layout == "zigzag" else ANY_LENGTH},
        "tree": {"tree": random_tree(6, multiple=8)},
    }[of]
    given |= {"layout": layout, "rope": True}
    pools(tp * cp).run(parallel_equals_one_rank, ATTENTION, tp, cp, sp, **given)


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
def test_a_tree_with_tensor_parallelism_alone_equals_one_rank(pools, sp):
    tree = random_tree(9, multiple=2)
    pools(2).run(parallel_equals_one_rank, ATTENTION, 2, 1, sp, tree=tree, rope=True)


@pytest.mark.parametrize(
    ("cp", "layout"), [(1, "zigzag"), (2, "zigzag"), (2, "contiguous")]
)
@on_ranks(cp="cp")
def test_no_bit_of_it_follows_torchs_defaults(cp, layout):
    layer = build_attention(attention_config(), groups_of_megatron(), cp_layout=layout)
    mine = local_indices(
        [48], cp, layer.pg_collection.cp.rank(), SequenceLayout(layout)
    )
    x = torch.randn(48 // cp, 1, layer.config.hidden_size)
    causal = torch.arange(48) > mine[:, None]
    tree = Tree((-1, 0, 0), (7, 16, 23), multiple=8)
    batches = [thd((8, 24, 0, 16)), tree.params]
    query = torch.randn(3, 1, HEADS, HEAD_SIZE)
    key, value = torch.randn(2, 7, 1, 2, HEAD_SIZE)

    def results() -> list[dict[str, torch.Tensor]]:
        masked = partial(layer, attention_mask=causal.clone()[None, None])
        made = [forward_backward(layer, x, run=lambda x, *_, **__: masked(x))]
        made += [forward_backward(layer, x, packed) for packed in batches]
        if cp == 1:  # in generation: the last three tokens of seven
            last = layer.core_attention(query, key, value, None)
            made.append({"last tokens": last})
        return made

    for found, expected in zip(*by_both_defaults(results), strict=True):
        require_same_bits(found, expected)


@layouts
def test_the_context_parallel_group_of_the_micro_batch_is_honoured(pools, layout):
    given = {"lengths": UNEQUAL, "layout": layout, "own_cp_group": True, "rope": True}
    pools(2).run(parallel_equals_one_rank, ATTENTION, 1, 2, **given)


class OthersCore(nn.Module):
    """As Transformer Engine's: no `TorchAttention`, and attends over the group of the
    micro-batch."""

    def __init__(self, core):
        super().__init__()
        self.core = core

    def forward(self, *args, **kwargs):
        return self.core(*args, **kwargs)


@pytest.mark.parametrize("named", [True, False])
@on_ranks(cp=2)
def test_another_core_gets_queries_rotated_for_the_group_of_the_micro_batch(named):
    """Megatron 0.19 rotates for the layer's group, whatever group the core takes. A
    size of 1 needs no group."""
    lengths = (8, 24, 16)
    one = build_attention(attention_config(), alone(), rope=True)
    layer = build_attention(
        attention_config(context_parallel_size=2), groups_of_megatron(), rope=True
    )
    layer.load_state_dict(one.state_dict())
    layer.core_attention = OthersCore(layer.core_attention)
    packed = thd(lengths)
    packed.cp_group = group_of_one() if named else None
    packed.local_cp_size = 1
    x = torch.randn(48, 1, HIDDEN)
    expected, _ = one(x, packed_seq_params=thd(lengths))
    actual, _ = layer(x, packed_seq_params=packed)
    assert_close("output", actual, expected, TOLERANCE)


@on_ranks(cp=2)
def test_a_tree_on_one_rank_of_a_models_group_names_the_group_of_its_rank():
    """Without a group the model would cut the rotary positions over its own ranks."""
    model = build_model(2, False, layers=(1, 0), positions="rope")
    tokens = torch.arange(32)[None] % 16
    packed = tree_packed_seq_params((8, 8, 16), (-1, 0, 0), device="cpu")
    packed.local_cp_size = 1
    packed.max_seqlen_q = packed.max_seqlen_kv = 48  # twice what is needed
    with pytest.raises(ValueError, match="own context-parallel group of 2 ranks"):
        model(tokens, tokens, None, packed_seq_params=packed)
    packed.cp_group = group_of_one()
    out = model(tokens, tokens, None, packed_seq_params=packed)
    both = out.clone()
    dist.all_reduce(both)
    assert_close("logits of the other rank", both - out, out, TOLERANCE)


class CoreInZigzag(nn.Module):
    """As Transformer Engine's: takes tokens as cut in zigzag, whatever the loader did."""

    def __init__(
        self, config, layer_number, mask_type, attention_type, pg_collection=None
    ):
        super().__init__()
        self.core = build_core(config, pg_collection, "zigzag")

    def forward(self, *args, **kwargs):
        return self.core(*args, **kwargs)


def core_in_zigzag(cp: int, cp_layout: str) -> nn.Module:
    return class_with_tree_attention(CoreInZigzag)(
        attention_config(context_parallel_size=cp),
        1,
        AttnMaskType.causal,
        "self",
        pg_collection=groups_of_megatron(),
        cp_layout=cp_layout,
    )


def local_qkv(batch: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """Of 24 tokens of this rank, ``[24, *batch, heads, D]``."""
    torch.manual_seed(5)
    return [torch.randn(24, *batch, heads, HEAD_SIZE) for heads in (HEADS, 2, 2)]


def local_batch(lengths: tuple[int, ...] | None) -> tuple[list, PackedSeqParams | None]:
    """Queries, keys and values of packed documents, or of a batch of one row."""
    if lengths is None:
        return local_qkv((1,)), None
    return local_qkv(), thd(lengths)


@pytest.mark.parametrize("kind", ["torch", "with trees"])
@pytest.mark.parametrize("of", ["batch", "tree"])
@on_ranks(cp=2)
def test_groups_default_to_megatrons_global_ones(kind, of):
    config = attention_config(context_parallel_size=2)
    core = TorchAttention
    if kind == "with trees":
        core = class_with_tree_attention(CoreInZigzag)
    packed = None
    if of == "tree":
        packed = tree_packed_seq_params((16, 16, 16), (-1, 0, 0), device="cpu")
    outputs = [
        core(config, 1, AttnMaskType.causal, "self", **groups)(
            *local_qkv((1,)), None, packed_seq_params=packed
        )
        for groups in ({}, {"pg_collection": groups_of_megatron()})
    ]
    assert torch.equal(*outputs)


OTHER_CUTS = [
    ("contiguous", (8, 24, 16)),
    ("contiguous", (48,)),
    ("contiguous", None),
    ("zigzag_buffer", (8, 0, 40)),
]


@pytest.mark.parametrize(("layout", "lengths"), OTHER_CUTS, ids=str)
@on_ranks(cp=2)
def test_a_core_in_zigzag_refuses_another_cut(layout, lengths):
    qkv, packed = local_batch(lengths)
    core = core_in_zigzag(2, "zigzag")
    core(*qkv, None, packed_seq_params=packed)
    core.cp_layout = layout  # as set in a model that is built
    for refusing in (core, core_in_zigzag(2, layout)):
        with pytest.raises(
            ValueError, match=f"micro-batch '{layout}' over 2 .*in zigzag"
        ):
            refusing(*qkv, None, packed_seq_params=packed)


@pytest.mark.parametrize(
    ("layout", "lengths"),
    [("zigzag", (8, 24, 16)), ("zigzag_buffer", (0, 48, 0)), ("zigzag_buffer", None)],
    ids=str,
)
@on_ranks(cp=2)
def test_a_core_in_zigzag_takes_what_is_cut_as_in_zigzag(layout, lengths):
    qkv, packed = local_batch(lengths)
    config = attention_config(context_parallel_size=2)
    expected = build_core(config, groups_of_megatron(), layout)
    assert torch.equal(
        core_in_zigzag(2, layout)(*qkv, None, packed_seq_params=packed),
        expected(*qkv, None, packed_seq_params=packed),
    )


@on_ranks(cp=2)
def test_a_core_in_zigzag_takes_a_batch_whatever_is_said_of_packed_documents():
    qkv, _ = local_batch(None)
    core = core_in_zigzag(2, "auto")
    packed = PackedSeqParams(qkv_format="sbhd")
    packed.cp_partition_mode = "contiguous"
    found = core(*qkv, None, packed_seq_params=packed)
    assert torch.equal(found, core(*qkv, None))


@pytest.mark.parametrize("of", ["batch", "packed", "tree"])
@on_ranks(cp=2)
def test_megatron_rotates_for_a_core_in_zigzag_whatever_the_cut_but_no_trees(of):
    layer = build_attention(
        attention_config(context_parallel_size=2), groups_of_megatron(), rope=True
    )
    tree = random_tree(6, multiple=4)
    packed = {"batch": None, "packed": thd(UNEQUAL), "tree": tree.params}[of]
    tokens = sum(tree.slots if of == "tree" else UNEQUAL)
    x = torch.randn(tokens // 2, 1, HIDDEN)
    expected, _ = layer(x, packed_seq_params=packed)
    layer.core_attention = core_in_zigzag(2, "zigzag")
    for layout in ("zigzag",) if of == "tree" else ("zigzag", "contiguous"):
        layer.cp_layout = layout
        found, _ = layer(x, packed_seq_params=packed)
        assert_close("output", found, expected, TOLERANCE)


@layouts
@pytest.mark.parametrize("lengths", [None, UNEQUAL], ids=["batch", "packed"])
@on_ranks(cp=2)
def test_a_layer_without_rope_rotates_nothing_in_any_layout(lengths, layout):
    config = attention_config(context_parallel_size=2, no_rope_freq=[1])
    groups = groups_of_megatron()
    layer = build_attention(config, groups, cp_layout=layout)
    packed = None if lengths is None else thd(lengths)
    x = torch.randn(28, 1, HIDDEN)
    found, expected = (
        _turned(layer.forward, config, groups, rope, x, packed_seq_params=packed)[0]
        for rope in (True, False)
    )
    assert torch.equal(found, expected)


@on_ranks(cp=2)
def test_a_batch_over_other_ranks_than_the_models_angles_is_refused():
    config = attention_config(context_parallel_size=2)
    groups = groups_of_megatron()
    layer = build_attention(config, groups)
    packed = PackedSeqParams(
        qkv_format="sbhd", cp_group=group_of_one(), local_cp_size=1, max_seqlen_q=28
    )
    x = torch.randn(28, 1, HIDDEN)
    with pytest.raises(NotImplementedError, match="its own .* group.*pack the"):
        _turned(layer.forward, config, groups, True, x, packed_seq_params=packed)


@on_ranks(cp=2)
def test_a_core_in_zigzag_refuses_nothing_that_is_not_cut():
    """A micro-batch that brings a group of one rank, and trees, which run in a
    `TorchAttention`."""
    core = core_in_zigzag(2, "contiguous")
    packed = thd((8, 16))
    packed.local_cp_size = 1
    qkv = local_qkv()
    alone_on_rank = build_core(attention_config(), alone(), "contiguous")
    expected = alone_on_rank(*qkv, None, packed_seq_params=thd((8, 16)))
    for group in (group_of_one(), None):
        packed.cp_group = group
        assert torch.equal(core(*qkv, None, packed_seq_params=packed), expected)
    tree = tree_packed_seq_params((16, 16, 16), (-1, 0, 0), device="cpu")
    by_torch = build_core(
        attention_config(context_parallel_size=2), groups_of_megatron(), "zigzag"
    )
    core.cp_layout = "zigzag"  # the hidden attention follows
    assert torch.equal(
        core(*qkv, None, packed_seq_params=tree),
        by_torch(*qkv, None, packed_seq_params=tree),
    )
    core.cp_layout = "contiguous"
    by_torch.cp_layout = "contiguous"
    assert torch.equal(
        core(*qkv, None, packed_seq_params=tree),
        by_torch(*qkv, None, packed_seq_params=tree),
    )


@layouts
@pytest.mark.parametrize("cp", [1, 2])
@on_ranks(cp="cp")
def test_a_document_changes_no_bit_of_another(cp, layout):
    """Another document's values, NaN included, change no bit of this one's output and
    gradient."""
    lengths = (8, 24, 16)
    changed = range(8, 32)
    group = parallel_state.get_context_parallel_group()
    groups = groups_of_megatron()
    core = build_core(attention_config(context_parallel_size=cp), groups, layout)
    torch.manual_seed(5)
    qkv = [torch.randn(48, h, HEAD_SIZE) for h in (HEADS, 2, 2)]
    other = [x.clone() for x in qkv]
    for x in other:
        x[changed[0] : changed[-1] + 1] = float("nan")
    mine = local_indices(lengths, cp, group.rank(), SequenceLayout.parse(layout))
    found = []
    for tensors in (qkv, other):
        local = [x[mine].requires_grad_() for x in tensors]
        out = core(*local, None, packed_seq_params=thd(lengths))
        (out * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
        found.append([out.detach(), *(x.grad for x in local)])
    kept = torch.tensor([position not in changed for position in mine.tolist()])
    for before, after in zip(*found, strict=True):
        assert before[kept].abs().max() > 0
        assert torch.equal(before[kept], after[kept])
        assert after[~kept].isnan().any() or kept.all()


@on_ranks(cp=1)
def test_bf16_is_rounded_like_bf16():
    """A packed forward against fp64 of the same numbers."""
    lengths = (40, 88)
    core = build_core(
        attention_config(num_query_groups=4, bf16=True), alone(), "zigzag"
    )
    torch.manual_seed(5)
    q, k, v = (torch.randn(128, HEADS, HEAD_SIZE).bfloat16() for _ in range(3))
    out = core(q, k, v, None, packed_seq_params=thd(lengths))
    assert out.dtype == torch.bfloat16 and out.shape == (128, HEADS * HEAD_SIZE)
    exact = []
    for a, b, c in zip(*(x.double().split(lengths) for x in (q, k, v)), strict=True):
        scores = torch.einsum("shd,thd->hst", a, b) / HEAD_SIZE**0.5
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        p = scores.masked_fill(~causal, float("-inf")).softmax(-1)
        exact.append(torch.einsum("hst,thd->shd", p, c).flatten(1))
    error = (out.double() - torch.cat(exact)).abs().max()
    # |o| <= max |v|. Rounding o costs 2^-9 of it; probabilities, which sum to 1, may be rounded
    # before their product with v (2^-9), and their sum is of unrounded ones (another 2^-9).
    assert 0 < error <= 3 * 2**-9 * v.abs().max().item()


@on_ranks(cp=1)
def test_dropout_is_for_training():
    config = attention_config()
    config.attention_dropout = 0.5
    core = build_core(config, alone(), "zigzag")
    tensors = [torch.ones(16, h, HEAD_SIZE) for h in (HEADS, 2, 2)]
    packed = thd((16,))
    dropped = core(*tensors, None, packed_seq_params=packed)
    kept = core.eval()(*tensors, None, packed_seq_params=packed)
    # Every value is 1, and so is every mean of them.
    assert torch.allclose(kept, torch.ones_like(kept))
    assert not torch.allclose(dropped, kept)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            {"window_size": (4, 0)},
            "cannot combine context_parallel_size=2 with window_size=(4, 0)",
        ),
        (
            {"softmax_type": "off-by-one"},
            "context_parallel_size=2 with softmax_type='off-by-one'",
        ),
        ("not causal", "cannot combine context_parallel_size=2 with attn_mask_type="),
        ("bias", "adds no attention_bias"),
        ("mask", "is not a causal mask"),
    ],
    ids=str,
)
@on_ranks(cp=2)
def test_what_it_cannot_do_is_refused(what, message):
    changes = what if isinstance(what, dict) else {}
    kind = AttnMaskType.no_mask if what == "not causal" else AttnMaskType.causal
    with pytest.raises((NotImplementedError, ValueError), match=re.escape(message)):
        config = attention_config(context_parallel_size=2, **changes)
        core = build_core(config, groups_of_megatron(), "zigzag", kind)
        core(
            *(torch.zeros(16, h, HEAD_SIZE) for h in (HEADS, 2, 2)),
            torch.zeros(1, 1, 16, 32, dtype=torch.bool) if what == "mask" else None,
            attention_bias=torch.zeros(1) if what == "bias" else None,
            packed_seq_params=thd((8, 24)),
        )


@on_ranks(cp=2)
def test_in_parallel_a_causal_mask_has_all_rows_of_the_batch_or_one():
    config = attention_config(context_parallel_size=2)
    groups = groups_of_megatron()
    core = build_core(config, groups, "zigzag")
    tensors = [torch.randn(4, 2, heads, HEAD_SIZE) for heads in (HEADS, 2, 2)]
    expected = core(*tensors, None)
    mine = local_indices([8], 2, groups.cp.rank())
    causal = (torch.arange(8) > mine[:, None])[None, None]
    for mask in (causal, causal.repeat(2, 1, 1, 1), torch.ones(2, 8)):
        assert torch.equal(core(*tensors, mask), expected)
    with pytest.raises(NotImplementedError, match="combine context parallelism with"):
        core(*tensors, None, AttnMaskType.no_mask)


@on_ranks(cp=2)
def test_rotations_of_fewer_positions_than_the_longest_document_has_are_refused():
    config = attention_config(context_parallel_size=2)
    layer = build_attention(config, groups_of_megatron(), cp_layout="contiguous")
    x = torch.zeros(16, 1, HIDDEN)
    angles = torch.zeros(8, 1, 1, HEAD_SIZE)
    with pytest.raises(ValueError, match="set both to at least 24"):
        layer(x, None, rotary_pos_emb=angles, packed_seq_params=thd((8, 24)))
