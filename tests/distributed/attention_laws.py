"""Run on every rank: plain-torch attention, whole and in parallel, against a direct softmax."""

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
)
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import build_module

from megatron_gdn import SequenceLayout
from megatron_gdn.context_parallel import local_indices
from megatron_gdn.mixers.attention.attention import TorchAttention
from megatron_gdn.specs.local import local_attention_spec
from tests.distributed.layer_laws import thd
from tests.parallel import assert_close, group_of_one, make_config, parallel

HIDDEN, HEADS, HEAD_SIZE = 24, 4, 6


def attention_config(groups: int, **changes):
    return make_config(
        num_attention_heads=HEADS,
        num_query_groups=groups,
        kv_channels=HEAD_SIZE,
        add_bias_linear=False,
        attention_dropout=0.0,
        **changes,
    )


def build_attention(config, groups: ProcessGroupCollection, layout: str):
    spec = local_attention_spec(qk_layernorm=config.qk_layernorm, cp_layout=layout)
    return build_module(spec, config, layer_number=1, pg_collection=groups)


def direct_softmax(x, weights, groups: int, lengths, rope: bool, qk_norm_eps: float | None):
    """The layer's formula on the whole buffer ``[S, B, D]``, written out; in the dtype of x.

    ``lengths`` are the documents of a packed buffer, or one length: a batch.
    """
    shared_by = HEADS // groups
    qkv = (x @ weights["linear_qkv.weight"].T).unflatten(-1, (groups, shared_by + 2, HEAD_SIZE))
    q, k, v = qkv.split([shared_by, 1, 1], dim=-2)
    q = q.flatten(2, 3)
    k, v = (t.expand(*t.shape[:3], shared_by, HEAD_SIZE).flatten(2, 3) for t in (k, v))

    def norm(t, weight):
        return t * (t.square().mean(-1, keepdim=True) + qk_norm_eps).rsqrt() * weight

    if qk_norm_eps is not None:
        q, k = norm(q, weights["q_layernorm.weight"]), norm(k, weights["k_layernorm.weight"])
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    position = torch.cat([torch.arange(length) for length in lengths]).to(x.dtype)
    if rope:
        frequency = 10000 ** -(torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE).to(x.dtype)
        angle = (position[:, None] * frequency).repeat(1, 2)[:, None, None]

        def rotate(t):
            first, second = t.chunk(2, -1)
            return t * angle.cos() + torch.cat((-second, first), -1) * angle.sin()

        q, k = rotate(q), rotate(k)
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) / HEAD_SIZE**0.5
    order = torch.arange(len(document))
    seen = (order[:, None] >= order) & (document[:, None] == document)
    probabilities = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    out = torch.einsum("bhst,tbhd->sbhd", probabilities, v).flatten(2)
    return out @ weights["linear_proj.weight"].T


def parallel_equals_a_direct_softmax(
    tp: int,
    cp: int,
    sequence_parallel: bool = False,
    lengths: tuple[int, ...] | None = None,
    layout: str = "zigzag",
    groups: int = 2,
    rope: bool = True,
    qk_layernorm: bool = False,
    own_cp_group: bool = False,
    recompute: bool = False,
    tolerance: float = 1e-5,
) -> None:
    """Output, input gradient and every parameter's gradient."""
    batch, tokens = (2, 48) if lengths is None else (1, sum(lengths))
    documents = lengths or (tokens,)
    changes = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    with parallel(tp=tp, cp=cp):
        config = attention_config(
            groups,
            tensor_model_parallel_size=tp,
            context_parallel_size=1 if own_cp_group else cp,
            sequence_parallel=sequence_parallel,
            qk_layernorm=qk_layernorm,
            **(changes if recompute else {}),
        )
        cp_group = parallel_state.get_context_parallel_group()
        tp_group = parallel_state.get_tensor_model_parallel_group()
        built_with = ProcessGroupCollection(
            tp=tp_group, cp=group_of_one() if own_cp_group else cp_group
        )
        layer = build_attention(config, built_with, layout)

        torch.manual_seed(5)
        shapes = {
            "linear_qkv.weight": ((HEADS + 2 * groups) * HEAD_SIZE, HIDDEN),
            "linear_proj.weight": (HIDDEN, HEADS * HEAD_SIZE),
        }
        if qk_layernorm:
            shapes |= {"q_layernorm.weight": (HEAD_SIZE,), "k_layernorm.weight": (HEAD_SIZE,)}
        whole = {
            name: (torch.randn(shape) * 0.5 + ("norm" in name)).double().requires_grad_()
            for name, shape in shapes.items()
        }
        x = torch.randn(tokens, batch, HIDDEN).double().requires_grad_()
        weight = torch.randn(tokens, batch, HIDDEN).double()
        eps = config.layernorm_epsilon if qk_layernorm else None
        y = direct_softmax(x, whole, groups, documents, rope, eps)
        (y * weight).sum().backward()

        def share(name, tensor):
            dim = {"linear_qkv.weight": 0, "linear_proj.weight": 1}.get(name)
            return tensor if dim is None else tensor.chunk(tp, dim)[tp_group.rank()]

        assert {name for name, _ in layer.named_parameters()} == whole.keys()
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(share(name, whole[name]))
        ddp = DistributedDataParallel(
            config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), layer
        )
        mine = local_indices(documents, cp, cp_group.rank(), SequenceLayout.parse(layout))
        angles = None
        if rope:
            rotary = RotaryEmbedding(
                HEAD_SIZE, 1.0, use_cpu_initialization=True, cp_group=built_with.cp
            )
            angles = rotary(max(documents), packed_seq=lengths is not None)
        packed = None if lengths is None else thd(lengths)
        if own_cp_group:
            packed.cp_group, packed.local_cp_size = cp_group, cp
        if sequence_parallel:
            mine = mine.chunk(tp)[tp_group.rank()]
        x_mine = x.detach()[mine].float().requires_grad_()
        y_mine, bias = ddp(x_mine, None, rotary_pos_emb=angles, packed_seq_params=packed)
        assert bias is None
        (y_mine * weight[mine].float()).sum().backward()
        ddp.finish_grad_sync()
        _allreduce_non_tensor_model_parallel_grads([ddp], config)

        assert_close("output", y_mine, y[mine], tolerance)
        assert_close("input gradient", x_mine.grad, x.grad[mine], tolerance)
        for name, parameter in layer.named_parameters():
            expected = share(name, whole[name].grad)
            assert expected.abs().max() > 0, f"{name}: no gradient to compare"
            assert_close(f"gradient of {name}", parameter.main_grad, expected, tolerance)


def documents_do_not_see_each_other(cp: int, layout: str) -> None:
    """Another document's values, NaN included, change no bit of this one's output and gradient."""
    lengths = (8, 24, 16)
    changed = range(8, 32)
    with parallel(cp=cp):
        group = parallel_state.get_context_parallel_group()
        groups = ProcessGroupCollection(tp=group_of_one(), cp=group)
        core = build_core(attention_config(2, context_parallel_size=cp), groups, layout)
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


def packed_documents_are_each_document_alone() -> None:
    """Bit for bit in the core; and an empty document is nothing."""
    lengths = (7, 0, 24, 1)
    with parallel():
        groups = ProcessGroupCollection(tp=group_of_one(), cp=group_of_one())
        core = build_core(attention_config(2), groups, "zigzag")
        torch.manual_seed(5)
        tensors = [torch.randn(32, h, HEAD_SIZE) for h in (HEADS, 2, 2)]
        together = core(*tensors, None, packed_seq_params=thd(lengths))
        one_by_one = [
            core(*parts, None, packed_seq_params=thd((length,)))
            for length, *parts in zip(lengths, *(x.split(lengths) for x in tensors), strict=True)
            if length
        ]
        assert torch.equal(together, torch.cat(one_by_one))


def bf16_error() -> tuple[float, float]:
    """Largest error of a packed bf16 forward against fp64 of the same numbers; largest |v|."""
    lengths = (40, 88)
    with parallel():
        groups = ProcessGroupCollection(tp=group_of_one(), cp=group_of_one())
        core = build_core(attention_config(4, bf16=True), groups, "zigzag")
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
        return (out.double() - torch.cat(exact)).abs().max().item(), v.abs().max().item()


def dropout_is_for_training() -> None:
    with parallel():
        groups = ProcessGroupCollection(tp=group_of_one(), cp=group_of_one())
        config = attention_config(2)
        config.attention_dropout = 0.5
        core = build_core(config, groups, "zigzag")
        tensors = [torch.ones(16, h, HEAD_SIZE) for h in (HEADS, 2, 2)]
        packed = thd((16,))
        dropped = core(*tensors, None, packed_seq_params=packed)
        kept = core.eval()(*tensors, None, packed_seq_params=packed)
        # Every value is 1, and so is every mean of them.
        assert torch.allclose(kept, torch.ones_like(kept))
        assert not torch.allclose(dropped, kept)


def refusal(what: str) -> str:
    """The message with which the layer declines."""
    changes = {
        "window": {"window_size": (4, 0)},
        "sinks": {"softmax_type": "off-by-one"},
        "not causal": {},
        "bias": {},
        "mask": {},
        "max_seqlen": {},
    }[what]
    lengths = (8, 24)
    with parallel(cp=2):
        groups = ProcessGroupCollection(
            tp=group_of_one(), cp=parallel_state.get_context_parallel_group()
        )
        try:
            config = attention_config(2, context_parallel_size=2, **changes)
            if what == "max_seqlen":
                layer = build_attention(config, groups, "contiguous")
                angles = torch.zeros(8, 1, 1, HEAD_SIZE)
                layer(
                    torch.zeros(16, 1, HIDDEN), None,
                    rotary_pos_emb=angles, packed_seq_params=thd(lengths),
                )  # fmt: skip
            kind = AttnMaskType.no_mask if what == "not causal" else AttnMaskType.causal
            core = build_core(config, groups, "zigzag", kind)
            core(
                *(torch.zeros(16, h, HEAD_SIZE) for h in (HEADS, 2, 2)),
                torch.zeros(1, 1, 16, 32, dtype=torch.bool) if what == "mask" else None,
                attention_bias=torch.zeros(1) if what == "bias" else None,
                packed_seq_params=thd(lengths),
            )
        except (NotImplementedError, ValueError) as error:
            return str(error)
    return ""


def build_core(config, groups, layout: str, mask_type=AttnMaskType.causal) -> TorchAttention:
    return TorchAttention(config, 1, mask_type, "self", pg_collection=groups, cp_layout=layout)
