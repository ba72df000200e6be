"""What a layer is beside its mathematics, the same for each mixer of the package."""

import copy
import gc
import sys
import weakref
from inspect import signature
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from megatron.core import utils
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.ssm import gated_delta_net as upstream
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import DeviceMesh, DTensor

from megatron_gdn import (
    Documents,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    KimiDeltaAttention,
    Mamba2Mixer,
    SequenceLayout,
)
from megatron_gdn.compat.observe import log_once, nvtx_range_of
from megatron_gdn.compat.torch_linear import DuplicatedLinear
from megatron_gdn.mixers import base, fp8, generation, micro_batch
from tests import toy_mixer
from tests.distributed.layer_laws import (
    by_megatron,
    checkpointed,
    forward_backward,
    reentrant,
    require_same_bits,
    thd,
)
from tests.distributed.mixers import BY_NAME, FULL_GATES, whole
from tests.megatron_sources import SOURCES, class_of
from tests.parallel import alone, make_config
from tests.written_out import OPTIONS, REFERENCES

pytestmark = pytest.mark.usefixtures("one_rank")


CHECKPOINTS = {
    "reentrant": reentrant,
    "by hooks": checkpointed,
    "of Megatron": by_megatron,
    "its own": lambda layer, *args: with_(layer, recompute_layer=True)(*args),
}
each_mixer = pytest.mark.parametrize("kind", BY_NAME)


def with_(layer, **settings):
    vars(layer).update(settings)
    return layer


@each_mixer
def test_a_copy_computes_the_same_and_shares_only_its_groups(kind):
    layer = whole(kind)
    x = torch.randn(7, 2, layer.config.hidden_size)
    expected = forward_backward(layer, x)
    copied = copy.deepcopy(layer)
    assert copied.pg_collection is layer.pg_collection
    require_same_bits(forward_backward(copied, x), expected)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.fill_(0.5)
    copied(x, None)
    assert layer.micro_batches is not copied.micro_batches
    stored = [x for x in vars(layer.micro_batches).items() if isinstance(x[1], dict)]
    assert len(stored) == 3
    assert not any(x is vars(copied.micro_batches)[name] for name, x in stored)
    require_same_bits(forward_backward(layer, x), expected)


@pytest.mark.each_value
@pytest.mark.parametrize("tokens", [7, 0])
@pytest.mark.parametrize("way", CHECKPOINTS)
@pytest.mark.parametrize("kind", [*BY_NAME, "with biases"])
def test_inside_a_checkpoint_no_bit_changes(kind, way, tokens):
    if (kind, way) == ("mamba2", "its own"):
        pytest.skip("Megatron's config has no such option for Mamba2")
    layer = whole("gdn", bias=True) if kind == "with biases" else whole(kind)
    x = torch.randn(tokens, 2, layer.config.hidden_size)
    expected = forward_backward(layer, x)
    again = CHECKPOINTS[way]
    for _step in range(2):
        found = forward_backward(
            layer, x, run=lambda x, *_, **__: again(layer, x, None)
        )
        require_same_bits(found, expected)
        assert all(parameter.is_leaf for parameter in layer.parameters())


@pytest.fixture
def opened(monkeypatch):
    """What Megatron's own NVTX stack opens with its profiling on; torch's markers need
    CUDA."""
    names = []
    monkeypatch.setattr(utils, "_nvtx_enabled", True)
    monkeypatch.setattr(utils, "_nvtx_range_messages", [])
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", names.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: None)
    return names


@each_mixer
def test_nvtx_ranges_are_called_by_the_mixer(kind, opened):
    layer = whole(kind)
    x = torch.randn(5, 1, layer.config.hidden_size)
    layer(x, None)
    of_forward = set(opened)
    assert f"{type(layer).__name__}.mixer" in of_forward
    assert {message.partition(".")[0] for message in opened} == {type(layer).__name__}
    opened.clear()
    with torch.inference_mode():
        layer.eval()(x, inference_context=StaticInferenceContext(1, 9))
    assert set(opened) == of_forward
    opened.clear()
    dynamic = SimpleNamespace(is_static_batching=lambda: False)
    instead = {"_refuse_generation": Mock(), "_dynamic_step": Mock()}
    with patch.multiple(generation, **instead):
        generation.generate(layer, x, dynamic, None, None)
    assert opened == [f"{type(layer).__name__}.mixer"]


@each_mixer
def test_an_ordinary_layer_names_its_rule_and_logs_nothing_else(kind, log):
    """A log line tells of a repair, of a slower way or of what is not done."""

    def run():
        layer = whole(kind)
        x = torch.randn(5, 1, layer.config.hidden_size)
        for packed in (None, thd((2, 3))):
            layer(x, None, packed_seq_params=packed)[0].sum().backward()
        with torch.inference_mode():
            layer.eval()(x, inference_context=StaticInferenceContext(1, 9))

    run()  # also names what this machine lacks, once per process
    log.clear()
    log_once.cache_clear()
    run()
    own = [x.getMessage() for x in log.records if x.name.startswith("megatron_gdn")]
    assert own and all(" backend " in text for text in own), own


@each_mixer
def test_fronts_are_made_for_the_dtype_of_rows_and_the_taps(kind, monkeypatch):
    """A front that is asked for another dtype may run without kernels, unnoticed."""
    layer = whole(kind)
    planner = layer.micro_batches
    make = planner._make_front
    given = set()

    def noted(layout, rule, *where_and_what):
        given.add(where_and_what)
        return make(layout, rule, *where_and_what)

    monkeypatch.setattr(planner, "_make_front", noted)
    cpu = torch.device("cpu")
    planner.of_whole_sequences(cpu, torch.float64)
    layer(torch.randn(5, 1, layer.config.hidden_size), None)
    taps = layer.conv_parameters[0].shape[-1]
    assert given == {(cpu, torch.float64, taps), (cpu, torch.float32, taps)}


def test_the_price_of_packed_documents_counts_them(monkeypatch):
    """Many short documents are cheaper headwise, one long sequence is not."""
    planner = whole("gdn").micro_batches
    priced = []

    def price(*arguments):
        priced.append(arguments[4:7])
        return SimpleNamespace(headwise=1.0, chunkwise=2.0, cheaper_mode="headwise")

    schemes = [
        SimpleNamespace(
            name=name,
            layout=planner._layout,
            size=4,
            is_logged=False,
            needs_exchange=lambda documents: True,
        )
        for name in ("headwise", "chunkwise")
    ]
    monkeypatch.setattr(micro_batch, "price", price)
    monkeypatch.setattr(micro_batch, "ranks_per_machine", lambda *_: 4)
    monkeypatch.setattr(planner, "_schemes_of", lambda *_: schemes)
    group = SimpleNamespace(size=lambda: 4)
    documents = Documents.from_cu_seqlens((0, 8, 8, 24), 24)
    layout = SequenceLayout.ZIGZAG
    for packed, rows in ((None, 5), (documents, 1)):
        proj = torch.empty(6, rows, planner._layout.width)
        planner._choose_scheme(group, None, layout, packed, proj)
    assert priced == [(24, 5, None), (24, 1, (8, 0, 16))]


def under_megatron_fsdp(kind, monkeypatch):
    """A layer as Megatron-FSDP marks it; what it changes in torch's planner ends with
    the test."""
    set_up = DefaultLoadPlanner.set_up_planner
    monkeypatch.setattr(DefaultLoadPlanner, "set_up_planner", set_up)
    mark = "_may_lack_row_order"
    monkeypatch.setattr(DefaultLoadPlanner, mark, None, raising=False)
    delattr(DefaultLoadPlanner, mark)
    layer = whole(kind)
    layer.in_proj.weight.megatron_fsdp_dist_index = None
    return layer


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_file_of_before_that_loads(monkeypatch, tmp_path):
    layer = under_megatron_fsdp("gdn", monkeypatch)
    state = layer.state_dict(prefix="layer.")
    state = {name: x for name, x in state.items() if x is not None}
    planner = DefaultLoadPlanner.set_up_planner
    layer.state_dict()
    assert DefaultLoadPlanner.set_up_planner is planner  # changed once
    entry = state.pop("layer.in_proj_stored_by")
    checkpoint.save(state, checkpoint_id=tmp_path, no_dist=True)
    loaded = {name: torch.zeros_like(x) for name, x in state.items()}
    given = {**loaded, "layer.in_proj_stored_by": entry}
    checkpoint.load(given, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(x, state[name]) for name, x in loaded.items())
    with pytest.raises(CheckpointException, match="layer.more"):
        more = {**loaded, "layer.more": torch.zeros(1)}
        checkpoint.load(more, checkpoint_id=tmp_path, no_dist=True)


@each_mixer
def test_a_file_says_in_which_order_fsdp_stores_the_rows_of_in_proj(kind, monkeypatch):
    """Megatron's scripts that cut in_proj cut those of the layers that Megatron has."""
    layer = under_megatron_fsdp(kind, monkeypatch)
    entry = "in_proj_stored_by"
    assert entry not in whole(kind).state_dict()
    state = layer.state_dict()
    assert state[entry].tolist() == [1]
    layer.load_state_dict(state)
    for other, said in ((2, "--tensor-model-parallel-size 2"), (0, "that wrote it")):
        with pytest.raises(ValueError, match=f"in_proj.weight: .* {said}"):
            layer.load_state_dict({**state, entry: torch.tensor([other])})
    script = SimpleNamespace(handle_gdn_in_state_dict=True)
    monkeypatch.setitem(sys.modules, "megatron.training.checkpointing", script)
    is_cut = kind == "gdn" or (
        kind == "kda" and hasattr(upstream, "KimiDeltaAttention")
    )
    assert layer.state_dict()[entry].tolist() == [0 if is_cut else 1]


@pytest.mark.parametrize("change", ["a part", "another size"])
@each_mixer
def test_other_state_dicts_load_as_torch_loads_them(kind, change):
    """A part with ``strict=False``; an error of torch about another size."""
    layer = whole(kind)
    state = layer.state_dict()
    if change == "a part":
        part = {name: value for name, value in state.items() if "_proj" not in name}
        missing, unknown = layer.load_state_dict(part, strict=False)
        assert "in_proj.weight" in missing and not unknown
    else:
        state = {"in_proj.weight": state["in_proj.weight"][1:]}
        with pytest.raises(RuntimeError, match="size mismatch for in_proj.weight"):
            layer.load_state_dict(state, strict=False)


def test_a_range_is_closed_when_its_body_raises(opened):
    with (
        pytest.raises(KeyError, match="inner"),
        nvtx_range_of("", "mixer"),
        nvtx_range_of("", "in_proj"),
    ):
        assert utils._nvtx_range_messages == ["str.mixer", "str.in_proj"]
        raise KeyError("inner")
    assert utils._nvtx_range_messages == []
    with nvtx_range_of(
        "", "out_proj"
    ):  # Megatron refuses to close a range that is not the last opened
        assert utils._nvtx_range_messages == ["str.out_proj"]
    assert utils._nvtx_range_messages == [] and len(opened) == 3


@pytest.mark.parametrize("kind", BY_NAME)
def test_linears_have_names_below_the_mixers_own(kind, monkeypatch):
    names = []
    build = base.build_linear

    def noted(*args, name, **more):
        names.append(name)
        return build(*args, name=name, **more)

    monkeypatch.setattr(base, "build_linear", noted)
    whole(kind, name="decoder.layers.3.mixer")
    of_mixer = [f"decoder.layers.3.mixer.{name}" for name in ("in_proj", "out_proj")]
    assert names[:2] == of_mixer


OF_TRANSFORMER_ENGINE = {
    ColumnParallelLinear: "TEColumnParallelLinear",
    RowParallelLinear: "TERowParallelLinear",
    DuplicatedLinear: "TELinear",
}


@pytest.mark.parametrize("core", SOURCES)
@pytest.mark.parametrize("kind", BY_NAME)
def test_linears_are_given_all_that_those_of_transformer_engine_ask_for(
    kind, core, monkeypatch
):
    """Where torch's linears have a default, theirs may have none."""
    built = []
    build = fp8.build_module

    def compared(spec, *sizes, **given):
        built.append(build(spec, *sizes, **given))
        name = OF_TRANSFORMER_ENGINE[type(built[-1])]
        of_te = class_of(core / "extensions/transformer_engine.py", name)
        theirs = next(x for x in of_te.body if getattr(x, "name", "") == "__init__")
        asked = zip(theirs.args.kwonlyargs, theirs.args.kw_defaults, strict=True)
        by_name = {x.arg: default is not None for x, default in asked}
        assert given.keys() <= by_name.keys()
        assert {
            x for x, has_default in by_name.items() if not has_default
        } <= given.keys()
        return built[-1]

    monkeypatch.setattr(fp8, "build_module", compared)
    mixer = whole(kind)
    assert {mixer.in_proj, mixer.out_proj} <= set(built)


@pytest.mark.parametrize("D_has_hdim", [False, True])
def test_a_skip_has_a_number_per_head_or_per_channel(D_has_hdim):
    mixer = whole("mamba2", D_has_hdim=D_has_hdim)
    heads = mixer.dims.num_heads
    assert mixer.D.shape == (heads * mixer.dims.head_dim if D_has_hdim else heads,)


@pytest.mark.parametrize("kind", BY_NAME)
def test_rows_of_a_state_stay_apart_in_mamba2_alone(kind):
    assert whole(kind).dims.state_shape.diagonal is (kind == "mamba2")


@pytest.mark.parametrize(
    ("ranks", "gate"), [({}, ""), (FULL_GATES, "gate")], ids=["narrow", "full"]
)
def test_in_proj_of_kimi_delta_attention_gates_no_readout(ranks, gate):
    layout = whole("kda", **ranks).dims.in_proj_layout
    names = [section.name for section in layout.sections]
    assert layout.output_gate == "" and ("gate" in names) is bool(gate)


def defaults_of(function):
    parameters = signature(function).parameters.values()
    return {x.name: x.default for x in parameters if x.default is not x.empty}


@pytest.mark.parametrize(
    ("ours", "theirs", "own"),
    [
        (GatedDeltaNet, upstream.GatedDeltaNet, {}),
        (GatedDeltaNet2, upstream.GatedDeltaNet, {}),
        (KimiDeltaAttention, upstream.GatedDeltaNet, {}),
        (Mamba2Mixer, MambaMixer, {}),
        # As in GatedDeltaProduct of Megatron's main branch.
        (GatedDeltaProduct, MambaMixer, {"A_init_range": (0, 16), "conv_bias": False}),
    ],
)
def test_arguments_that_megatrons_mixer_takes_have_its_defaults(ours, theirs, own):
    found = defaults_of(ours.__init__)
    expected = defaults_of(theirs.__init__) | own
    shared = found.keys() & expected.keys()
    assert len(shared) >= 7
    assert {x: found[x] for x in shared} == {x: expected[x] for x in shared}


@each_mixer
def test_a_reference_without_options_is_of_the_mixer_without_options(kind):
    mixer = whole(kind)
    defaults = defaults_of(REFERENCES[type(mixer)])
    for name in OPTIONS[type(mixer)]:
        assert defaults[name] == getattr(mixer, name), name


def test_a_mixer_without_a_list_of_rules_takes_any_backend():
    """The mixer itself knows which names mean a rule."""
    config = make_config(hidden_size=toy_mixer.HIDDEN)
    mixer = toy_mixer.ToyMixer(config, alone(), backend="of its own")
    assert mixer.options.backend == "of its own"


@each_mixer
def test_megatrons_context_holds_states_as_megatrons_mixers_read_them(kind):
    """``[H, K, V]``; Mamba2's ``[H, V, K]``."""
    mixer = whole(kind)
    heads, rows, columns, _ = mixer.dims.state_shape
    assert rows != columns
    shape = (heads, columns, rows) if kind == "mamba2" else (heads, rows, columns)
    assert mixer.mamba_state_shapes_per_request()[1] == shape


@each_mixer
@pytest.mark.parametrize("asked", [False, True])
def test_a_mixer_has_the_biases_that_are_asked_for(kind, asked):
    options = {"bias": asked, "conv_bias": asked}
    if kind == "mamba2":
        del options["bias"]  # refused
    names = dict(whole(kind, **options).named_parameters())
    assert ("in_proj.bias" in names) is (asked and kind != "mamba2")
    assert ("conv1d.bias" in names or "conv1d_bias" in names) is asked


@each_mixer
@pytest.mark.parametrize("rates", [(3, 2), (-1, 2), (0, 0)], ids=str)
def test_first_decay_rates_are_drawn_from_a_range_above_zero(kind, rates):
    with pytest.raises(ValueError, match=r"A_init_range=\(.*\) must be \(low, high\)"):
        whole(kind, A_init_range=rates)


@each_mixer
def test_a_part_that_is_moved_is_returned(kind):
    """As torch's ``to`` and ``float`` return it."""
    assert all(part.float() is part for part in whole(kind).modules())


@each_mixer
@pytest.mark.parametrize("rank", [0, 1])
def test_shards_of_a_checkpoint_are_of_the_group_that_is_given(kind, rank):
    """Not of the layer's own, which has one rank. The linears have their own groups."""
    layer = whole(kind)
    group = SimpleNamespace(size=lambda: 2, rank=lambda: rank)
    metadata = {"dp_cp_group": layer.tp_group}
    entries = layer.sharded_state_dict("", (), metadata, tp_group=group)
    shards = [entries[name] for name in layer._keep_in_float32_parameter_names]
    (weight,) = entries.keys() & {"conv1d.weight", "conv1d_weight"}
    shards += entries[weight].build()
    for shard in shards:
        rows = shard.local_shape[0]
        place = shard.global_shape[0], shard.global_offset[0]
        assert place == (2 * rows, rank * rows), shard.key


@each_mixer
def test_a_layer_keeps_the_latest_32_micro_batches(kind):
    """A run whose documents always differ holds no more of their tables."""
    planner = whole(kind).micro_batches
    rows = torch.zeros(9, 1, planner._layout.width)
    seen = []
    for first in range(40):
        documents = Documents((0, 1 + first % 8, 9), rows.device)
        planner.of(None, rows, documents=documents)
        seen.append(weakref.ref(documents))
    del documents
    gc.collect()
    assert [x() is not None for x in seen] == [False] * 8 + [True] * 32


@each_mixer
def test_a_layer_keeps_its_own_scheme_and_those_of_the_latest_groups(kind):
    """And no micro-batch that would keep the others in memory."""
    planner = whole(kind).micro_batches
    rows = torch.zeros(9, 1, planner._layout.width)
    own = planner.of(None, rows).scheme
    seen = []
    for _group in range(20):
        group = Mock(size=lambda: 1, rank=lambda: 0)
        seen.append(weakref.ref(planner.of(None, rows, group=group).scheme))
    gc.collect()
    assert [x() is not None for x in seen] == [False] * 5 + [True] * 15
    assert planner.of(None, rows).scheme is own


@pytest.mark.parametrize(
    "argument",
    [{"norm_before_gate": True}, {"dt_init": "x"}, {"dt_scale": 2.0}, {"bias": True}],
    ids=str,
)
def test_arguments_that_megatrons_mamba2_ignores_are_refused(argument):
    with pytest.raises(ValueError, match=f"Mamba2Mixer takes {next(iter(argument))}="):
        whole("mamba2", **argument)


@each_mixer
def test_a_layer_of_which_fsdp2_has_one_parameter_is_not_saved(kind):
    layer = whole(kind)
    mesh = DeviceMesh("cpu", [0])
    share = DTensor.from_local(layer.out_proj.weight.detach(), mesh)
    layer.out_proj.weight = nn.Parameter(share)
    with pytest.raises(ValueError, match="FSDP2"):
        layer.sharded_state_dict()
