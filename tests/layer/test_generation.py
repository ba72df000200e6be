"""The layer under an inference context: what it generates is what its training forward
gives."""

from functools import partial

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn.functional import gelu, linear, silu, softplus

from megatron_gdn.inference import (
    gdn2_rows,
    gdn_rows,
    gdp_rows,
    kda_rows,
    mamba2_rows,
    prefill,
    roll_back,
)
from megatron_gdn.mixers.static_context import MOST_DECODED
from megatron_gdn.ops.stages import GatedNorm
from megatron_gdn.testing import RowByRow
from tests.distributed.layer_laws import thd
from tests.distributed.mixers import (
    BY_NAME,
    FULL_GATES,
    GDN,
    OLMO_HYBRID,
    in_fp64,
    whole,
)
from tests.processes import ROOT

pytestmark = pytest.mark.usefixtures("one_rank")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # fp32, as in tests/inference/test_step.py


of_both = pytest.mark.parametrize("kind", BY_NAME)


def make(kind="gdn", rows=2, tokens=80, most=200, **options):
    layer = whole(kind, **options).eval()
    x = torch.randn(tokens, rows, layer.config.hidden_size)
    return layer, x, StaticInferenceContext(rows, most)


def step(layer, x, context):
    with torch.inference_mode():
        out, _ = layer(x, inference_context=context)
    context.increment_sequence_len_offset(len(x))
    return out


def run(layer, x, context, parts):
    return torch.cat([step(layer, piece, context) for piece in x.split(list(parts))])


@pytest.mark.each_value
@pytest.mark.parametrize(
    "kind", [*BY_NAME, "write strengths up to 2", "olmo_hybrid", "full gates of kda"]
)
@pytest.mark.parametrize(
    "parts", [(80,), (77, 1, 1, 1), (30, 40, 5, 5), (64, 16), (3, 77)]
)
def test_prefill_chunks_and_steps_give_the_training_forward(kind, parts):
    if kind in BY_NAME:
        layer, x, context = make(kind)
    elif kind == "full gates of kda":
        layer, x, context = make("kda", **FULL_GATES)
    else:
        mixers = OLMO_HYBRID if kind == "olmo_hybrid" else GDN
        layer = mixers.whole(mixers.config(), allow_neg_eigval=True).eval()
        x = torch.randn(80, 2, 24)
        context = StaticInferenceContext(2, 200)
    with torch.no_grad():
        expected, _ = layer(x)
    torch.testing.assert_close(run(layer, x, context, parts), expected, **CLOSE)
    context.reset()
    torch.testing.assert_close(
        run(layer, x.flip(1), context, parts), expected.flip(1), **CLOSE
    )


@of_both
def test_a_changed_norm_counts_in_every_step(kind):
    layer, x, context = make(kind)
    with torch.no_grad():
        plain = layer(x)[0]
    norm = layer.out_norm if hasattr(layer, "out_norm") else layer.norm
    norm.register_forward_hook(lambda module, args, out: 2 * out)
    with torch.no_grad():
        expected = layer(x)[0]
    torch.testing.assert_close(expected, 2 * plain, **CLOSE)
    torch.testing.assert_close(run(layer, x, context, (77, 1, 1, 1)), expected, **CLOSE)


def test_a_causal_mask_passes_at_any_offset_and_another_is_refused():
    layer, x, context = make(tokens=12)
    future = torch.ones(12, 12, dtype=torch.bool).triu(1)[None, None]
    with torch.inference_mode():
        layer(x[:8], future[..., :8, :8], inference_context=context)
        context.increment_sequence_len_offset(8)
        layer(x[8:], future[..., 8:, :], inference_context=context)
        context.increment_sequence_len_offset(4)
        with pytest.raises(NotImplementedError, match="attention_mask"):
            layer(x[:4], future[..., :4, :4], inference_context=context)


@pytest.mark.each_value
@of_both
@pytest.mark.parametrize("accepted", [0, 1, 3, 4])
def test_roll_back_in_a_static_context_is_exact(kind, accepted):
    """To the bits of a run without the rejected tokens, with a product of its own for
    each row.

    A layer's projections of four tokens and of one are products of two shapes.
    """
    layer, x, context = make(kind, tokens=30)
    other = StaticInferenceContext(2, 200)
    with RowByRow():
        run(layer, x[:24], context, (20, 4))
        run(layer, x[: 20 + accepted], other, (20, *[1] * accepted))
    roll_back(context, accepted)
    assert context.sequence_len_offset == 20 + accepted
    for ours, theirs in zip(
        context.key_value_memory_dict[1], other.key_value_memory_dict[1], strict=True
    ):
        assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="no step to roll back"):
        roll_back(context, 0)


@pytest.mark.parametrize("shape", [(5, 7), (3, 5, 7), (7,), (0, 7)], ids=str)
def test_row_by_row_computes_what_all_rows_at_once_give(shape):
    """A softmax does over every dimension."""
    x = torch.randn(shape)
    weight = torch.randn(6, 7)
    functions = [
        partial(function, x, dim)
        for function in (torch.softmax, torch.log_softmax)
        for dim in range(-x.dim(), x.dim())
    ]
    functions += [partial(f, x) for f in (torch.exp, silu, gelu, softplus)]
    functions += [partial(linear, x, weight, bias) for bias in (None, weight[:, 0])]
    for function in functions:
        with RowByRow():
            found = function()
        torch.testing.assert_close(found, function())


@of_both
def test_a_step_in_place_ends_the_time_for_a_roll_back(kind):
    layer, x, context = make(kind, tokens=9)
    layer.config.batch_invariant_mode = True
    run(layer, x, context, (5, 3, 1))
    with pytest.raises(ValueError, match="no step to roll back"):
        roll_back(context, 1)


@pytest.mark.each_value
@of_both
@pytest.mark.parametrize("accepted", [1, 2, 4])
def test_a_roll_back_over_the_end_of_a_chunk_is_exact(kind, accepted):
    """In batch-invariant mode, where the second token of the step ends a chunk of
    64."""
    layer, x, context = make(kind, rows=1, tokens=70)
    layer.config.batch_invariant_mode = True
    fed = torch.cat([x[: 62 + accepted], x[66:]])
    with RowByRow():
        run(layer, x[:66], context, (61, 1, 4))
        roll_back(context, accepted)
        with torch.no_grad():
            expected, _ = layer(fed)
        assert torch.equal(
            run(layer, x[66:], context, [1] * 4), expected[62 + accepted :]
        )


@of_both
def test_megatrons_own_reordering_of_a_batch_reorders_the_states(kind):
    layer, x, context = make(kind, tokens=20)
    step(layer, x[:15], context)
    context.swap_key_value_dict([1, 0])
    swapped = torch.cat([x[:15], x[15:].flip(1)])
    with torch.no_grad():
        expected, _ = layer(torch.cat([swapped[:15], swapped[15:].flip(1)]))
    torch.testing.assert_close(
        step(layer, x[15:].flip(1), context), expected[15:].flip(1), **CLOSE
    )


@of_both
@pytest.mark.parametrize("firsts", [(0, 2), (2, 0)], ids=str)
def test_micro_batches_of_a_context_keep_apart(kind, firsts):
    layer, x, _ = make(kind, rows=4, tokens=12)
    context = StaticInferenceContext(4, 20)
    with torch.no_grad():
        expected, _ = layer(x)
    for start, end in ((0, 8), (8, 12)):
        for first in firsts:
            context.batch_size_offset = first
            with torch.inference_mode():
                out, _ = layer(
                    x[start:end, first : first + 2], inference_context=context
                )
            torch.testing.assert_close(
                out, expected[start:end, first : first + 2], **CLOSE
            )
        context.batch_size_offset = 0
        context.increment_sequence_len_offset(end - start)
    assert context.sequence_len_offset == 12


def states_of(context):
    return [x.clone() for pair in context.key_value_memory_dict.values() for x in pair]


def trained_again(layer, x, context):
    """A forward that its backward would compute again, without the context."""
    layer.train().recompute_layer = True
    layer(x.requires_grad_(), inference_context=context)


def rolled_back_after_a_swap(layer, x, context):
    memories = dict(context.key_value_memory_dict)
    context.swap_key_value_dict([1, 0])
    try:
        roll_back(context, 1)
    finally:
        context.key_value_memory_dict = memories


@pytest.mark.parametrize(
    ("change", "call", "words"),
    [
        (
            {},
            lambda layer, x, c: step(layer, x[:, :1], c),
            "the state of 2 rows .* got 1 rows",
        ),
        ({"sequence_len_offset": 7}, None, "after 12 tokens, .* sequence_len_offset=7"),
        ({"max_sequence_length": 13}, None, "max_sequence_length=13"),
        ({"batch_size_offset": 1}, None, "made for max_batch_size=2"),
        ({}, lambda layer, x, c: step(layer.double(), x.double(), c), "torch.float64"),
        ({}, lambda layer, x, c: layer(x, inference_context=c), "no backward"),
        ({}, trained_again, "no backward"),
        *(
            ({}, lambda layer, x, c, n=n: roll_back(c, n), "accepted=.* must be 0 to 2")
            for n in (-1, 3)
        ),
        ({}, rolled_back_after_a_swap, "was reordered .* roll back before"),
    ],
)
def test_what_does_not_fit_a_context_is_refused_and_changes_nothing(
    change, call, words
):
    layer, x, context = make(tokens=12)
    run(layer, x, context, (10, 2))
    before = states_of(context)
    vars(context).update(change)
    with pytest.raises((ValueError, NotImplementedError), match=words):
        (call or step)(layer, x[:3], context)
    assert all(
        torch.equal(a, b) for a, b in zip(states_of(context), before, strict=True)
    )


def test_in_a_new_context_there_is_nothing_to_roll_back():
    with pytest.raises(ValueError, match="no step to roll back"):
        roll_back(StaticInferenceContext(1, 9), 0)


@of_both
def test_a_frozen_layer_generates_outside_of_no_grad_too(kind):
    layer, x, context = make(kind, tokens=3)
    layer.requires_grad_(False)
    out, _ = layer(x, inference_context=context)
    assert torch.equal(out, layer(x)[0])


def test_a_context_counts_under_its_old_name_and_under_both():
    layer, x, _ = make(tokens=7)
    outputs = []
    for names in (
        ("inference_context",),
        ("inference_params",),
        ("inference_context", "inference_params"),
    ):
        context = StaticInferenceContext(2, 9)
        with torch.inference_mode():
            layer(x[:4], **dict.fromkeys(names, context))
            context.increment_sequence_len_offset(4)
            outputs.append(layer(x[4:], **dict.fromkeys(names, context))[0])
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_a_first_token_at_an_offset_has_no_state():
    layer, x, context = make(tokens=3)
    context.sequence_len_offset = 4
    with pytest.raises(ValueError, match="has no state"):
        step(layer, x, context)


def test_a_layer_without_a_number_is_refused():
    layer, x, context = make(tokens=3)
    layer.layer_number = None
    with pytest.raises(ValueError, match="build it with layer_number=1, 2"):
        step(layer, x, context)


def test_a_batch_that_is_said_not_to_be_packed_generates():
    layer, x, context = make(tokens=6)
    packed = PackedSeqParams(qkv_format="sbhd")
    with torch.inference_mode():
        out, _ = layer(x, inference_context=context, packed_seq_params=packed)
        assert torch.equal(out, layer(x)[0])


@pytest.mark.parametrize("graphs", ["none", "local"])
def test_packed_requests_are_refused(graphs):
    """In a layer of which Megatron captures training steps, too."""
    layer, x, context = make(rows=1, tokens=6)
    layer.config.cuda_graph_impl = graphs
    with (
        torch.inference_mode(),
        pytest.raises(NotImplementedError, match="DynamicInferenceContext"),
    ):
        layer(x, packed_seq_params=thd((2, 4)), inference_context=context)
    assert not context.key_value_memory_dict


@pytest.fixture
def decode(monkeypatch):
    """The benchmark of decode steps."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return __import__("decode")


@pytest.mark.parametrize(
    ("kind", "heads", "channels"), [("gdn", 8 * 8 * 12, 160), ("mamba2", 8 * 5 * 3, 44)]
)
@pytest.mark.parametrize("on_the_grid", [False, True])
def test_the_benchmark_of_decode_steps_runs(decode, kind, heads, channels, on_the_grid):
    layer = whole(kind).eval()
    layer.config.batch_invariant_mode = on_the_grid
    line = decode.measure(layer, batch=2, repeats=1, rate=1e6)
    assert line["layer_ms"] > line["floor_ms"]
    if not on_the_grid:
        of_sequence = (heads + channels * 3) * 4  # bytes
        assert line["floor_ms"] == pytest.approx(2 * 2 * of_sequence / 1e6)


@of_both
@pytest.mark.parametrize("tokens", [1, MOST_DECODED + 1])
def test_a_step_of_one_token_or_of_many_cannot_be_rolled_back(kind, tokens):
    layer, x, context = make(kind, tokens=9 + tokens)
    run(layer, x, context, (5, 4, tokens))
    with pytest.raises(ValueError, match="no step to roll back"):
        roll_back(context, 0)


@of_both
def test_a_context_begun_again_with_other_rows_rolls_these_back(kind):
    """The two rows that it had before are no layer's progress any more."""
    layer, x, context = make(kind, tokens=9)
    run(layer, x[:8], context, (5, 2, 1))
    context.sequence_len_offset = 0
    context.batch_size_offset = 1
    other = x[:, :1]
    run(layer, other[:8], context, (5, 3))
    roll_back(context, 1)
    assert context.sequence_len_offset == 6
    with torch.no_grad():
        expected, _ = layer(other)
    torch.testing.assert_close(step(layer, other[6:], context), expected[6:], **CLOSE)


# A layer's kind and options, the function of its rows, and the same of the function.
SETTINGS = {
    "gdn": ("gdn", {}, gdn_rows, {}),
    "write strengths up to 2": (
        "gdn",
        {"allow_neg_eigval": True},
        gdn_rows,
        {"allow_neg_eigval": True},
    ),
    "gdn, any length": (
        "gdn",
        {"use_qk_l2norm": False},
        gdn_rows,
        {"normalise_qk": False},
    ),
    "gdn2": ("gdn2", {}, gdn2_rows, {}),
    "gdn2, any length": (
        "gdn2",
        {"use_qk_l2norm": False},
        gdn2_rows,
        {"normalise_qk": False},
    ),
    "gdp": ("gdp", {}, gdp_rows, {}),
    "kda": ("kda", {}, kda_rows, {}),
    "bounded decay": (
        "kda",
        {"gate_lower_bound": -5.0},
        kda_rows,
        {"lower_bound": -5.0},
    ),
    "mamba2": ("mamba2", {}, mamba2_rows, {}),
    "bounded time steps": (
        "mamba2",
        {"dt_limit": (0.3, 0.6)},
        mamba2_rows,
        {"dt_limit": (0.3, 0.6)},
    ),
}


@pytest.mark.parametrize(
    ("kind", "options", "rows_of_mixer", "settings"), SETTINGS.values(), ids=SETTINGS
)
def test_stages_from_tensors_compute_what_the_layer_computes(
    kind, options, rows_of_mixer, settings
):
    """Also where a norm spans a group of heads, of which its function is not told."""
    layer = in_fp64(kind, **options).eval()
    x = torch.randn(7, 2, layer.config.hidden_size, dtype=torch.float64)
    with torch.no_grad():
        rows = layer.project(x)
        expected = layer.stages_of_whole_sequences(rows)
        *parameters, gamma = expected.parameters
        activation = "sigmoid" if kind == "kda" else "silu"
        norm = GatedNorm(gamma, layer.config.layernorm_epsilon, activation=activation)
        made = rows_of_mixer(
            rows,
            *parameters,
            expected.table.layout,
            rule=expected.rule,
            norm=norm,
            **settings,
        )
        found = []
        for stages in (made, expected):
            memory = stages.memory_shape.zeros(2, rows.dtype, rows.device)
            mixed = prefill(rows, stages, memory, begins=True)
            found.append((mixed, memory.history, memory.state))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
