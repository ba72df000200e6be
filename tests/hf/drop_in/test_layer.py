"""The replaced module: transformers' numbers, keys and class, fp32 gates, and what it
refuses."""

import copy

import pytest
import torch

from megatron_gdn.hf import CPAwareGatedDeltaNet, patch
from megatron_gdn.hf.drop_in.families import transformers_class
from tests.hf.drop_in.conftest import (
    DENSE,
    FAMILIES,
    GLM,
    KIMI,
    NEXT,
    VISION,
    VISION_MOE,
    in_float64,
    mixer_of,
)
from tests.hf.float64_layer import float64_layer
from tests.parallel import assert_close

TOKENS = 70  # past the 64 of a chunk
# Their text models are those of two of the families.
IMAGES = [
    pytest.param(name, marks=pytest.mark.nightly) for name in (VISION, VISION_MOE)
]


def gradients(module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", [*FAMILIES, *IMAGES, GLM])
def test_unpacked_batches_have_the_bits_of_transformers(fresh, family):
    theirs = fresh(family)
    ours = fresh(family)
    assert len(patch(ours).layers) == 3
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    tokens = torch.randint(67, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    for more in ({}, {"attention_mask": mask}, {"attention_mask": mask.flip(-1)}):
        for model in (theirs, ours):
            model.zero_grad()
            model.result = model(tokens, labels=tokens, **more)
            model.result.loss.backward()
        assert torch.equal(theirs.result.logits, ours.result.logits)
        expected = gradients(theirs)
        found = gradients(ours)
        assert expected.keys() == found.keys()
        for name, gradient in expected.items():
            assert torch.equal(gradient, found[name]), name


@pytest.mark.parametrize("family", [*FAMILIES, GLM])
def test_the_fused_mixer_has_the_outputs_and_gradients_of_transformers(fresh, family):
    """fp32, 1e-5 of the largest entry; where transformers errs by more, it may differ
    by that."""
    model = fresh(family)
    theirs = copy.deepcopy(mixer_of(model))
    patch(model, unpacked="fused")
    ours = mixer_of(model)
    torch.manual_seed(4)
    x = torch.randn(2, TOKENS, 24)
    weight = torch.randn(2, TOKENS, 24)
    truth, params = float64_layer(theirs, x.double())
    (truth * weight).sum().backward()
    outputs = {}
    for layer in (theirs, ours):
        outputs[layer] = layer(x)
        (outputs[layer] * weight).sum().backward()
    assert_close("output", outputs[ours], truth, 1e-5)
    their_gradients = gradients(theirs)
    our_gradients = gradients(ours)
    assert their_gradients.keys() == our_gradients.keys() == params.keys()
    for name, param in params.items():
        scale = param.grad.abs().max()
        assert_close(name, our_gradients[name], param.grad, 1e-5)
        noise = ((their_gradients[name] - param.grad).abs().max() / scale).item()
        assert_close(name, our_gradients[name], their_gradients[name], 1e-5 + noise)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *IMAGES, GLM])
def test_a_whole_model_runs_fused_with_the_gradients_of_float64(fresh, family):
    """fp32 may err as transformers does in the worst of four runs, three of moved
    embeddings."""
    theirs = fresh(family)
    ours = fresh(family)
    truth = in_float64(fresh(family))
    for model in (ours, truth):
        patch(model, unpacked="fused")
    torch.manual_seed(12)
    tokens = torch.randint(67, (2, 11))

    def run(model):
        model.zero_grad()
        result = model(tokens, labels=tokens, use_cache=False)
        result.loss.backward()
        return result.logits.detach(), gradients(model)

    logits, expected = run(truth)
    our_logits, found = run(ours)
    assert_close("logits", our_logits, logits, 1e-5)
    weight = theirs.get_input_embeddings().weight
    runs = []
    for moved in range(4):
        if moved:
            sign = torch.randint_like(weight, 2) * 2 - 1
            weight.data.mul_(1 + sign * 2.0**-23)
        runs.append(
            {name: gradient.clone() for name, gradient in run(theirs)[1].items()}
        )
    assert expected.keys() == runs[0].keys() == found.keys()
    for name, gradient in expected.items():
        errors = [
            (one[name] - gradient).abs().max() / gradient.abs().max() for one in runs
        ]
        assert_close(name, found[name], gradient, 1e-5 + 2 * max(errors).item())


def test_one_layer_is_built_alone_and_is_of_transformers_class(fresh):
    model = fresh(NEXT)
    theirs = mixer_of(model)
    layer = CPAwareGatedDeltaNet(model.config, layer_idx=0, unpacked="fused")
    assert isinstance(layer, type(theirs)) and isinstance(layer, CPAwareGatedDeltaNet)
    assert type(theirs).__name__ == "Qwen3NextGatedDeltaNet"
    assert layer.state_dict().keys() == theirs.state_dict().keys()
    layer.load_state_dict(theirs.state_dict())
    x = torch.randn(1, 7, 24)
    assert_close("output", layer(x), theirs(x), 1e-5)
    theirs.load_state_dict(layer.state_dict())  # strict: the holder does not show


@pytest.mark.parametrize("family", [NEXT, KIMI])
def test_a_subclass_and_the_class_of_a_layer_build_layers_too(fresh, family):
    config = fresh(family).config
    theirs = transformers_class(mixer_of(fresh(family)))

    class Mixed(CPAwareGatedDeltaNet):
        """Of the config's family, which its class does not name."""

    class Own(CPAwareGatedDeltaNet, theirs):
        pass

    layer = CPAwareGatedDeltaNet(config, 0)
    for cls in (type(layer), Mixed, Own):
        made = cls(config, 0)
        assert isinstance(made, cls) and isinstance(made, theirs)
        assert made.state_dict().keys() == layer.state_dict().keys()
    assert type(type(layer)(config, 0)) is type(layer) and type(made) is Own
    # as torch's DataParallel copies it
    assert type(layer._replicate_for_data_parallel()) is type(layer)


def test_a_config_of_another_family_is_refused(fresh):
    from transformers import LlamaConfig

    with pytest.raises(
        ValueError, match="'llama' has no linear attention .* 'qwen3_next'"
    ):
        CPAwareGatedDeltaNet(LlamaConfig(), 0)


@pytest.mark.parametrize("family", [DENSE, NEXT])
def test_gates_are_fp32_in_a_holder_whatever_the_rest_is(fresh, family):
    config = fresh(family).config
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = CPAwareGatedDeltaNet(config, 0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.out_proj.weight.dtype == torch.bfloat16
    for cast in (lambda x: x, torch.nn.Module.half, lambda x: x.to(torch.bfloat16)):
        cast(layer)
        for name in ("A_log", "dt_bias"):
            assert getattr(layer, name).dtype == torch.float32
            assert getattr(layer, name) is layer._parameters[name]
            assert getattr(layer, name) is getattr(layer._fp32_params, name)
            assert layer.state_dict()[name].dtype == torch.float32


def test_rounded_gates_are_told_of_and_are_fp32_from_there_on(fresh, caplog):
    model = fresh(DENSE).bfloat16()
    parameter = mixer_of(model).A_log
    with caplog.at_level("WARNING"):
        patch(model)
    assert "gates_in_fp32()" in caplog.text
    assert mixer_of(model).A_log is parameter
    assert parameter.dtype == torch.float32
    assert model(torch.randint(67, (1, 5))).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("family", [DENSE, KIMI])
def test_undo_gives_back_the_classes_dtypes_and_parameters(fresh, family):
    model = fresh(family).bfloat16()
    before = fresh(family).bfloat16()
    if family == KIMI:  # experts of 12 columns in bf16 are in no grouped product
        for one in (model, before):
            one.set_experts_implementation("eager")
    names = [name for name, _ in model.named_parameters()]
    parameters = {id(p) for p in model.parameters()}
    with patch(model) as patched:
        assert len(patched.layers) == 3
        with pytest.raises(ValueError, match="replaced already"):
            patch(model)
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert parameters == {id(p) for p in model.parameters()}
    for ours, theirs in zip(model.modules(), before.modules(), strict=True):
        assert type(ours) is type(theirs)
    tokens = torch.randint(67, (1, 5))
    assert torch.equal(model(tokens).logits, before(tokens).logits)


def test_a_patch_under_a_wrapper_is_not_undone(fresh):
    model = fresh(DENSE)
    patched = patch(model)
    layer = mixer_of(model)
    patched_class = type(layer)
    layer.__class__ = type("FSDPLayer", (patched_class,), {})  # as `fully_shard` does
    with pytest.raises(RuntimeError, match="linear_attn has become a FSDPLayer since"):
        patched.undo()
    layer.__class__ = patched_class
    patched.undo()


def test_what_cannot_be_replaced_is_refused(fresh):
    other = type("Qwen3_5GatedDeltaNet", (torch.nn.Linear,), {})(2, 2)
    with_layers = torch.nn.Module()
    with_layers.layers = torch.nn.ModuleList([other])  # a class of another package
    for model in (other, with_layers):
        said = f"{type(model).__name__} has no linear-attention modules"
        with pytest.raises(ValueError, match=said):
            patch(model)
    with pytest.raises(ValueError, match="unpacked='ours' is not known"):
        patch(fresh(DENSE), unpacked="ours")
    with pytest.raises(ValueError, match="attention='ring' is not known"):
        patch(fresh(DENSE), attention="ring")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"mode": "headwise"},
            "unknown option mode; the options are cp_mesh, .*linear_cp_mode",
        ),
        ({"cp_mesh": 2}, "cp_mesh=2 is no device mesh"),
        ({"cp_mesh": "cp"}, "cp_mesh='cp' is no device mesh"),
        ({"recompute_qkv": "no"}, "recompute_qkv='no' must be True or False"),
        ({"backend": "triton"}, "unknown backend 'triton'"),
        ({"rule_operands": "fp8"}, "unknown rule_operands 'fp8'"),
        ({"linear_cp_mode": "ring"}, "unknown linear_cp_mode 'ring'"),
        ({"cp_layout": "zigzga"}, "unknown context-parallel layout 'zigzga'"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_when_they_are_given(fresh, options, said):
    model = fresh(DENSE)
    before = fresh(DENSE)
    with pytest.raises(ValueError, match=said):
        patch(model, **options)
    for ours, theirs in zip(model.modules(), before.modules(), strict=True):
        assert type(ours) is type(theirs)
    with pytest.raises(ValueError, match=said):
        CPAwareGatedDeltaNet(model.config, 0, **options)


def test_a_patched_model_can_be_compiled_around(fresh):
    model = fresh(DENSE)
    before = fresh(DENSE)
    patch(model, unpacked="fused")
    layer = torch.compile(mixer_of(model), backend="eager")
    x = torch.randn(1, 6, 24)
    assert_close("output", layer(x), before.model.layers[0].linear_attn(x), 1e-5)


def test_a_compiled_model_still_keeps_documents_apart(fresh):
    """``torch.compile`` leaves the steps that read boundaries out of its graphs."""
    model = fresh(DENSE)
    patch(model)
    tokens = torch.arange(1, 13)[None]
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    options = {"position_ids": positions, "use_cache": False}
    expected = model(tokens, **options).logits
    compiled = torch.compile(model, backend="eager")
    assert_close("logits", compiled(tokens, **options).logits, expected, 1e-5)
