"""TorchAttention by itself, on one rank."""

from unittest.mock import Mock

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_gdn import (
    set_documents,
    static_packed_seq_params,
    tree_packed_seq_params,
)
from megatron_gdn.mixers.attention import (
    TorchAttention,
    TorchSelfAttention,
    class_with_tree_attention,
)
from megatron_gdn.specs import hybrid_stack_spec
from megatron_gdn.specs.layer import latent_attention_spec
from tests.distributed.layer_laws import thd
from tests.parallel import (
    alone,
    assert_close,
    hybrid_model,
    make_config,
    model_config,
)


@pytest.mark.usefixtures("one_rank")
def test_over_one_rank_megatrons_own_forward_reads_no_context_parallelism(monkeypatch):
    """Megatron-LM's dev branch gathers keys and values by the config, and wants a mask
    for it."""
    sizes = []
    forward = DotProductAttention.forward

    def watched(self, *args, **kwargs):
        sizes.append(self.config.context_parallel_size)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(DotProductAttention, "forward", watched)
    attention = TorchAttention(
        config := make_config(context_parallel_size=2),
        1,
        AttnMaskType.causal,
        "self",
        pg_collection=alone(),
    )
    q, k, v = torch.randn(3, 5, 1, 4, 6)
    attention(q, k, v, None)
    assert sizes == [1]
    assert attention.config is config and config.context_parallel_size == 2


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("context_parallel_size", [1, 2])
def test_attention_writes_nothing_to_the_callers_config(
    monkeypatch, context_parallel_size
):
    config = make_config(context_parallel_size=context_parallel_size)
    written = []

    def record(self, name, value):
        if self is config:
            written.append(name)
        object.__setattr__(self, name, value)

    monkeypatch.setattr(type(config), "__setattr__", record)
    attention = TorchAttention(
        config, 1, AttnMaskType.causal, "self", pg_collection=alone()
    )
    q, k, v = torch.randn(3, 5, 1, 4, 6)
    attention(q, k, v, None)
    assert written == []


@pytest.mark.usefixtures("one_rank")
def test_documents_in_fixed_buffers_are_read_by_attention_outside_of_graphs():
    config = make_config(hidden_size=16, num_attention_heads=2, attention_dropout=0.0)
    layer = TorchAttention(
        config, 1, AttnMaskType.causal, "self", pg_collection=alone()
    )
    q, k, v = torch.randn(3, 12, 2, 8)
    packed = static_packed_seq_params(12, 4, device="cpu")
    for lengths in ((12,), (5, 0, 7), (1, 2, 3, 6)):
        set_documents(packed, [0, *torch.tensor(lengths).cumsum(0).tolist()])
        found = layer(q, k, v, None, packed_seq_params=packed)
        assert torch.equal(found, layer(q, k, v, None, packed_seq_params=thd(lengths)))


def self_attention(config) -> TorchSelfAttention:
    parts = SelfAttentionSubmodules(
        ColumnParallelLinear, TorchAttention, RowParallelLinear
    )
    return TorchSelfAttention(
        config, parts, 1, AttnMaskType.causal, pg_collection=alone()
    )


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("interleaved", [False, True])
def test_an_empty_document_changes_nothing_whichever_way_rotations_are_laid(
    interleaved,
):
    config = make_config(
        hidden_size=16,
        num_attention_heads=2,
        attention_dropout=0.0,
        rotary_interleaved=interleaved,
    )
    layer = self_attention(config)
    angles = RotaryEmbedding(
        8, 1.0, rotary_interleaved=interleaved, use_cpu_initialization=True
    )(7)
    x = torch.randn(12, 1, 16)

    def outputs(lengths):
        return layer(x, None, rotary_pos_emb=angles, packed_seq_params=thd(lengths))[0]

    for lengths in ((5, 0, 7), (0, 5, 7), (5, 7, 0)):
        assert torch.equal(outputs(lengths), outputs((5, 7)))
    expected = outputs((5, 0, 7))
    angles = (angles, angles.clone())  # of queries and of keys
    assert torch.equal(outputs((5, 0, 7)), expected)


@pytest.mark.usefixtures("one_rank")
def test_a_tree_is_rotated_as_by_megatron_with_the_factor_of_yarn():
    """A tree of one document: Megatron does not rotate it, and rotates the batch."""
    config = make_config(hidden_size=16, num_attention_heads=2, attention_dropout=0.0)
    config.yarn_rotary_scaling_factor = 8.0  # of yarn models' configs alone
    layer = self_attention(config)
    angles = RotaryEmbedding(8, 1.0, use_cpu_initialization=True)(7)
    x = torch.randn(7, 1, 16)
    expected = layer(x, None, rotary_pos_emb=angles)[0]
    tree = tree_packed_seq_params((7,), (-1,), device="cpu")
    found = layer(x, None, rotary_pos_emb=angles, packed_seq_params=tree)[0]
    # fp32: some 80 roundings, for sums of at most 16 terms
    assert_close("output", found, expected, 1e-5)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_documents_draw_dropout_where_megatrons_attention_does(sequence_parallel):
    """Ranks that hold different heads draw from different generators."""
    config = make_config(attention_dropout=0.5)
    config.sequence_parallel = sequence_parallel
    layer = TorchAttention(
        config, 1, AttnMaskType.causal, "self", pg_collection=alone()
    )
    # the CPU and its generator where there is no GPU
    q, k, v = torch.randn(3, 7, 1, 4, 6, device=torch.cuda.current_device())

    def generators():
        states = get_cuda_rng_tracker().get_states()
        return {"default": torch.cuda.get_rng_state()} | states

    def drawn_from(**packed):
        before = {name: state.clone() for name, state in generators().items()}
        layer(q, k, v, None, **packed)
        after = generators()
        return [name for name in after if not torch.equal(after[name], before[name])]

    by_megatron = drawn_from()
    assert by_megatron and ("default" in by_megatron) == sequence_parallel
    assert drawn_from(packed_seq_params=thd((3, 4))) == by_megatron


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("dropout", "trains"), [(0.0, True), (0.5, False)])
def test_documents_without_dropout_ask_for_no_generator(dropout, trains, monkeypatch):
    """A process that only evaluates may have seeded none."""
    asked = Mock(side_effect=AssertionError)
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", asked)
    config = make_config(attention_dropout=dropout)
    layer = TorchAttention(
        config, 1, AttnMaskType.causal, "self", pg_collection=alone()
    ).train(trains)
    layer(*torch.randn(3, 7, 1, 4, 6), None, packed_seq_params=thd((3, 4)))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("with_batch", [False, True])
def test_packed_documents_are_one_row_and_are_named_in_errors(with_batch):
    config = make_config(attention_dropout=0.0)
    layer = TorchAttention(
        config, 1, AttnMaskType.causal, "self", pg_collection=alone()
    )
    tensors = torch.randn(3, 7, 1, 4, 6) if with_batch else torch.randn(3, 7, 4, 6)
    packed = {"packed_seq_params": thd((3, 4))}
    expected = layer(*tensors, None, **packed)
    assert torch.equal(layer(*tensors, torch.ones(1, 7), **packed), expected)
    with pytest.raises(NotImplementedError, match="combine packed documents with attn"):
        layer(*tensors, None, AttnMaskType.no_mask, **packed)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "settings", [{"window_size": (3, 0)}, {"softmax_type": "off-by-one"}], ids=str
)
def test_one_rank_runs_what_ranks_of_context_parallelism_cannot(settings):
    config = make_config(attention_dropout=0.0, **settings)
    ours, theirs = (
        each(config, 1, AttnMaskType.causal, "self", pg_collection=alone())
        for each in (TorchAttention, DotProductAttention)
    )
    q, k, v = torch.randn(3, 7, 1, 4, 6)
    assert torch.equal(ours(q, k, v, None), theirs(q, k, v, None))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("changes", "given"),
    [({"apply_query_key_layer_scaling": True}, {}), ({}, {"softmax_scale": 0.3})],
    ids=str,
)
def test_scores_of_documents_have_the_scale_of_megatrons_attention(changes, given):
    config = make_config(attention_dropout=0.0, **changes)
    layer = TorchAttention(
        config, 3, AttnMaskType.causal, "self", pg_collection=alone(), **given
    )
    q, k, v = torch.randn(3, 7, 1, 4, 6)
    expected = layer(q, k, v, None)
    # fp32: some 80 roundings, for scores of 6 terms and sums of at most 7 weights
    assert_close(
        "output", layer(q, k, v, None, packed_seq_params=thd((7,))), expected, 1e-5
    )


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("of", ["batch", "packed", "tree"])
def test_a_group_of_one_rank_may_be_left_out(of):
    """As Megatron's dynamic context parallelism does, which gives the size alone."""
    config = make_config(hidden_size=16, num_attention_heads=2, attention_dropout=0.0)
    layer = self_attention(config)
    angles = RotaryEmbedding(8, 1.0, use_cpu_initialization=True)(12)
    x = torch.randn(12, 1, 16)
    outputs = []
    for size in (None, 1):
        packed = {
            "batch": PackedSeqParams(qkv_format="sbhd"),
            "packed": thd((5, 7)),
            "tree": tree_packed_seq_params((5, 7), (-1, 0), device="cpu"),
        }[of]
        packed.local_cp_size = size
        outputs.append(
            layer(x, None, rotary_pos_emb=angles, packed_seq_params=packed)[0]
        )
    assert torch.equal(*outputs)


def latent_attention(**changes):
    settings = {
        "num_layers": 1,
        "hidden_size": 24,
        "num_attention_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 8,
        "qk_head_dim": 4,
        "qk_pos_emb_head_dim": 2,
        "v_head_dim": 6,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
    }
    config = MLATransformerConfig(**settings, **changes)
    spec = latent_attention_spec("local")
    return build_module(spec, config, layer_number=1, pg_collection=alone())


@pytest.mark.usefixtures("one_rank")
def test_latent_attention_rotates_nothing_whatever_rotation_the_config_names():
    """YaRN is the default of Megatron's config."""
    x = torch.randn(7, 1, 24)
    layers = [latent_attention(**x) for x in ({}, {"rope_type": "rope"})]
    layers[1].load_state_dict(layers[0].state_dict())
    assert torch.equal(*(layer(x, None)[0] for layer in layers))
    with pytest.raises(NotImplementedError, match="apply_rope_fusion=True: .*Set it"):
        latent_attention(apply_rope_fusion=True)


@pytest.mark.usefixtures("one_rank")
def test_latent_attention_of_a_batch_of_packed_documents_and_of_a_tree_is_the_same():
    layer = latent_attention()
    x = torch.randn(7, 1, 24)
    expected, _ = layer(x, None)
    for packed in (
        PackedSeqParams(qkv_format="sbhd"),
        thd((7,)),
        tree_packed_seq_params((3, 4), (-1, 0), device="cpu"),
    ):
        found, _ = layer(x, None, packed_seq_params=packed)
        # fp32: some 80 roundings, for sums of at most 24 terms
        assert_close("output", found, expected, 1e-5)


@pytest.mark.usefixtures("one_rank")
def test_dropout_in_trees_is_for_training_alone():
    config = make_config(attention_dropout=0.5)
    core = class_with_tree_attention(DotProductAttention)(
        config, 1, AttnMaskType.causal, "self", pg_collection=alone()
    )
    qkv = torch.ones(3, 7, 4, 6)
    tree = tree_packed_seq_params((3, 4), (-1, 0), device="cpu")
    for training in (True, False, True):
        out = core.train(training)(*qkv, None, packed_seq_params=tree)
        # every value is 1, and so is every mean of them
        assert torch.allclose(out, torch.ones_like(out)) is not training


@pytest.mark.usefixtures("one_rank")
def test_the_cut_that_was_set_is_read_back():
    """In every layer of a model, attention too, and by whatever class of attention."""
    spec = hybrid_stack_spec("local", cp_layout="contiguous")
    model = hybrid_model(model_config("G*"), "G*", spec)
    layers = [x for x in model.modules() if hasattr(x, "cp_layout")]
    assert {type(x) for x in layers} >= {TorchAttention, TorchSelfAttention}
    for layer in layers:
        assert layer.cp_layout == "contiguous"
        layer.cp_layout = "zigzag_buffer"
        assert layer.cp_layout == "zigzag_buffer"


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("lengths", [None, (3, 4)], ids=str)
def test_attention_of_the_same_bits_for_any_cut_has_the_same_values(lengths):
    """Query by query, with two value heads for each key head, as all at once."""
    q, k, v = torch.randn(7, 2, 4, 6), *torch.randn(2, 7, 2, 2, 6)
    packed = None
    if lengths is not None:
        q, k, v = q[:, :1], k[:, :1], v[:, :1]
        packed = thd(lengths)
    outputs = []
    for invariant in (False, True):
        config = make_config(
            num_query_groups=2, attention_dropout=0.0, batch_invariant_mode=invariant
        )
        layer = TorchAttention(
            config, 1, AttnMaskType.causal, "self", pg_collection=alone()
        )
        outputs.append(layer(q, k, v, None, packed_seq_params=packed))
    causal = torch.ones(7, 7).triu(1).bool()[None, None]
    masked = layer(q, k, v, causal, packed_seq_params=packed)
    assert torch.equal(masked, outputs[1])
    last = layer(q[4:], k, v, causal[:, :, 4:]) if packed is None else masked[4:]
    assert torch.equal(last, masked[4:])
    with pytest.raises(NotImplementedError, match="is not a causal mask"):
        layer(q, k, v, ~causal, packed_seq_params=packed)
    with pytest.raises(NotImplementedError, match="adds no attention_bias"):
        layer(q, k, v, None, attention_bias=q, packed_seq_params=packed)
    # fp32: some 80 roundings, for scores of 6 terms and sums of at most 7 weights
    assert_close("output", outputs[1], outputs[0], 1e-5)
