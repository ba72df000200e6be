"""The configuration, spec and flags of a model build it in Megatron, which counts its
FLOPs."""

import argparse
from types import SimpleNamespace

import pytest
import torch
from megatron.training import arguments, training
from megatron.training.argument_utils import core_transformer_config_from_args
from megatron.training.arguments import validate_args

from megatron_gdn.frameworks.patch import add_flags_of_kda
from megatron_gdn.hf import build_model, megatron_flags, transformer_config
from megatron_gdn.models import ENTRIES, find, stack
from megatron_gdn.models.__main__ import launch_flags, parse
from megatron_gdn.specs.hybrid import KDAHybridStack
from tests.models.test_flops import tiny
from tests.parallel import parallel

LAUNCHED = [
    (name, kind)
    for name, entry in ENTRIES.items()
    for kind in ("hybrid", "gpt")
    if entry.architecture.startswith("Qwen")
    or (entry.architecture.startswith(("Nemotron", "Kimi")) and kind == "hybrid")
]
# Quick tests build one model of each architecture and kind.
_FIRST = {
    (ENTRIES[name].architecture, kind): (name, kind)
    for name, kind in reversed(LAUNCHED)
}
# What a launch adds: data, tokenizer, optimizer; and the CPU.
MORE = [
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"),
    *("--train-iters", "1", "--lr", "1e-4", "--transformer-impl", "local"),
    *("--no-gradient-accumulation-fusion", "--no-rope-fusion"),
]


def arguments_of(
    monkeypatch, flags: list[str], world_size: int = 1
) -> argparse.Namespace:
    hopper = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: hopper)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # as in a launch that has built no stack: FLOPs are counted with the last one's
    monkeypatch.setattr(KDAHybridStack, "kda_options", {})
    add_flags_of_kda()
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
    args = parser.parse_args([*flags, *MORE])
    args.rank = 0
    args.world_size = world_size
    validate_args(args)
    return args


def tiny_arguments(monkeypatch, *more: str, flags=None) -> argparse.Namespace:
    """Of the tiny model, for sequences of 64 tokens."""
    flags = megatron_flags(find("tiny").hf) if flags is None else flags
    sizes = [
        "--seq-length",
        "64",
        "--max-position-embeddings",
        "64",
        "--micro-batch-size",
        "1",
    ]
    args = arguments_of(monkeypatch, [*flags, *sizes, *more])
    args.padded_vocab_size = 1024
    return args


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        case if case in _FIRST.values() else pytest.param(*case, marks=pytest.mark.slow)
        for case in LAUNCHED
    ],
)
def test_megatron_takes_the_flags_and_counts_the_flops_of_the_catalogue(
    monkeypatch, name, kind
):
    model = find(name)
    sizes = ["--tp", "2", "--cp", "2"]
    sizes += ["--ep", "4"] if "E" in model.pattern else []
    args = arguments_of(
        monkeypatch, launch_flags(model, parse([name, "--model", kind, *sizes])), 8
    )
    args.padded_vocab_size = model.hf.vocab_size
    counted = stack.num_floating_point_operations(args, 3)
    assert counted == model.stack.flops([4096] * 3).step
    if "K" not in model.pattern:  # Megatron counts no 'K' layers
        # as docs/models.md says
        ratio = training.num_floating_point_operations(args, 3) / counted
        assert 0.92 <= ratio <= {"hybrid": 1.08, "gpt": 1.0}[kind]
    packed = stack.num_floating_point_operations(args, 3, 4096**2 + 100**2, 4196)
    assert packed == model.stack.flops([4096, 100]).step

    theirs = core_transformer_config_from_args(args)
    ours = transformer_config(model.hf, kind)
    described = {
        *model.hf.megatron_settings(kind),
        "hidden_dropout",
        "attention_dropout",
    }
    different = {
        field: (getattr(ours, field), getattr(theirs, field))
        for field in described
        if getattr(ours, field) != getattr(theirs, field)
    }
    assert different == {}


@pytest.mark.parametrize(
    ("name", "kind", "changes"),
    [
        ("Qwen3.5-9B", "hybrid", {}),
        ("Qwen3.5-35B-A3B", "gpt", {}),
        ("Nemotron-3-Nano-4B", "hybrid", {}),
        ("Nemotron-3-Nano-30B-A3B", "hybrid", {}),
        ("Kimi-Linear-48B-A3B", "hybrid", {}),
        ("Kimi-Linear-48B-A3B", "hybrid", {"q_lora_rank": 16}),
    ],
)
def test_megatron_builds_as_many_parameters_and_the_model_computes(
    pools, name, kind, changes
):
    (found,) = pools(1).run(build, name, kind, changes)
    assert found == tiny(name, **changes).stack.parameters


def build(name: str, kind: str, changes: dict[str, object]) -> int:
    model = tiny(name, **changes)
    with parallel(1):
        built, _ = build_model(
            model.hf, kind, modules="local", max_sequence_length=8, vocab_divisible_by=1
        )
        tokens = torch.arange(8)[None]
        assert torch.isfinite(built(tokens, tokens, None, labels=tokens)).all()
    return sum(parameter.numel() for parameter in built.parameters())


def test_options_that_change_the_size_of_a_k_layer_are_counted(monkeypatch, pools):
    """Of the environment or of a call in Python: those that the stack was built
    with."""
    args = tiny_arguments(monkeypatch)
    args.hybrid_layer_pattern = "K-K"
    plain, narrow = pools(1).run(flops_of_built_stacks, args)[0]
    # A gate of low rank has rank * (D + H V) weights, a full one D * H V.
    D = args.hidden_size
    H = args.linear_num_value_heads
    V = args.linear_value_head_dim
    assert plain - narrow == 3 * 2 * 64 * 2 * (D * H * V - 4 * (D + H * V))


def flops_of_built_stacks(args: argparse.Namespace) -> list[float]:
    from megatron_gdn.specs import hybrid_stack_spec
    from tests.parallel import hybrid_model, make_config

    counts = []
    for kda in ({}, {"output_rank": 4}):
        with parallel(1):
            spec = hybrid_stack_spec("local", kda=kda)
            hybrid_model(make_config(num_layers=1), "-", spec)
        counts.append(stack.num_floating_point_operations(args, 1))
    return counts


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Qwen3.5-9B", "rope"),
        ("Nemotron-3-Nano-4B", "none"),
        ("Kimi-Linear-48B-A3B", "none"),
    ],
)
def test_flags_rotate_positions_in_models_that_do(name, kind):
    flags = megatron_flags(find(name).hf)
    assert flags[flags.index("--position-embedding-type") + 1] == kind
    rotary = [flag for flag in flags if flag.startswith("--rotary")]
    assert rotary == ["--rotary-percent", "--rotary-base"] * (kind == "rope")


@pytest.mark.parametrize("modules", ["local", "te"])
def test_transformer_engine_computes_all_experts_in_one_product(modules):
    for name, has_experts in (("Qwen3.5-9B", False), ("Qwen3.5-35B-A3B", True)):
        config = transformer_config(find(name).hf, modules=modules)
        assert config.moe_grouped_gemm is (has_experts and modules == "te")


@pytest.mark.parametrize("has_gpu", [False, True])
def test_parameters_are_bf16_on_a_gpu_and_fp32_elsewhere_unless_a_dtype_is_given(
    monkeypatch, has_gpu
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    for given in (None, torch.float32, torch.float16, torch.bfloat16):
        config = transformer_config(find("tiny").hf, dtype=given)
        dtype = given or (torch.bfloat16 if has_gpu else torch.float32)
        assert config.params_dtype == config.pipeline_dtype == dtype
        assert config.bf16 is (dtype == torch.bfloat16)
        assert config.fp16 is (dtype == torch.float16)
        assert config.use_cpu_initialization is not has_gpu


def test_mamba2_layers_in_a_gpt_model_are_refused():
    with pytest.raises(NotImplementedError, match="use model='hybrid'"):
        megatron_flags(find("Nemotron-H-8B").hf, "gpt")


def test_megatron_counts_v_squared_for_k_v_and_no_gate(monkeypatch):
    """Why its own count is replaced; if this fails, upstream was mended."""
    args, more = (
        tiny_arguments(monkeypatch, "--linear-key-head-dim", K) for K in ("16", "32")
    )
    # of q and k in three layers, and conv
    projections = 3 * 2 * 64 * 3 * (2 * 4 * 16) * (128 + 4)
    theirs = [training.num_floating_point_operations(x, 1) for x in (args, more)]
    ours = [stack.num_floating_point_operations(x, 1) for x in (args, more)]
    assert theirs[1] - theirs[0] == projections
    rule = 3 * 2 * 64 * 3 * 16 * (8 * 3 * 32 + 2 * 4 * 64)  # K grew by 16
    assert ours[1] - ours[0] == projections + rule
    args.attention_output_gate = False
    gate = 3 * 2 * 64 * 128 * 128
    assert training.num_floating_point_operations(args, 1) == theirs[0]
    assert stack.num_floating_point_operations(args, 1) == ours[0] - gate


def test_training_counts_with_ours_and_with_its_own_where_layers_are_not_known(
    monkeypatch,
):
    monkeypatch.setattr(training, "num_floating_point_operations", lambda *_: "theirs")
    stack.count_flops_in_megatron()
    args = tiny_arguments(monkeypatch)
    assert (
        training.num_floating_point_operations(args, 1)
        == find("tiny").stack.flops([64]).step
    )
    for name, value in (
        ("multi_latent_attention", True),
        ("moe_latent_size", 64),
        ("experimental_attention_variant", "gdn2"),
        ("spec", ["somewhere", "gdp_stack_spec"]),
        ("spec", ["somewhere", "gated_delta_product_spec"]),
        ("hybrid_layer_pattern", "GD"),
    ):
        other = argparse.Namespace(**vars(args) | {name: value})
        assert training.num_floating_point_operations(other, 1) == "theirs", name
    counts = training.num_floating_point_operations
    stack.count_flops_in_megatron()
    assert training.num_floating_point_operations is counts
    args.padded_vocab_size = None
    with pytest.raises(TypeError):  # an error of ours is not hidden
        training.num_floating_point_operations(args, 1)


@pytest.mark.parametrize(
    ("given", "counted_as"),
    [
        ({"group_query_attention": False}, {"num_query_groups": 8}),
        ({"spec": None}, {}),
        (
            {"moe_shared_expert_intermediate_size": None},
            {"moe_shared_expert_intermediate_size": 0},
        ),
    ],
)
def test_what_a_launch_leaves_out_counts_as_what_megatron_builds(
    monkeypatch, given, counted_as
):
    flags = megatron_flags(tiny("Qwen3.5-35B-A3B", num_attention_heads=8).hf)
    args = vars(tiny_arguments(monkeypatch, flags=flags))
    assert args.keys() >= given.keys() | counted_as.keys()
    counts = {
        stack.num_floating_point_operations(argparse.Namespace(**args | changes), 1)
        for changes in (given, counted_as)
    }
    assert len(counts) == 1


def test_heads_of_multi_token_prediction_are_counted_in_both_models(monkeypatch):
    counts = []
    for kind, more in (("gpt", ["--mtp-num-layers", "2"]), ("hybrid", [])):
        flags = megatron_flags(find("tiny").hf, kind)
        if kind == "hybrid":
            flags[flags.index("--hybrid-layer-pattern") + 1] += "/*-/*-"
        args = tiny_arguments(monkeypatch, *more, flags=flags)
        counts.append(stack.num_floating_point_operations(args, 1))
    D = 128
    one = find("tiny").stack
    head = 2 * 64 * (2 * D * D + 1024 * D)
    layers = 2 * 64 * sum(layer.matrix_weights for layer in one.layers[-2:])
    attention = 64**2 * one.layers[-2].attention_multiply_adds
    assert (
        counts[0]
        == counts[1]
        == one.flops([64]).step + 2 * 3 * (head + layers + attention)
    )
