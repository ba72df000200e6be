"""The holder of the fp32 gates, and what files, caches and recomputation keep of
them."""

import pytest
import torch
import torch.nn.functional as F

from megatron_gdn.hf import gates_in_fp32, patch
from megatron_gdn.hf.drop_in import SSMGate, install_ssm_gate
from megatron_gdn.hf.drop_in.gates import shard_gates
from tests.hf.drop_in.conftest import (
    DENSE,
    FAMILIES,
    GLM,
    KIMI,
    NEXT,
    VISION,
    VISION_MOE,
)
from tests.hf.test_layer_mapping import assert_same_file
from tests.hf.tiny_models import cache_name
from tests.parallel import assert_close


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [DENSE, NEXT])
def test_the_gate_is_that_of_float64_to_fp32_for_inputs_of_any_dtype(
    fresh, family, dtype
):
    model = fresh(family).to(dtype)
    patch(model)
    layer = model.model.layers[0].linear_attn
    a = (torch.randn(2, 5, 8) * 30).to(dtype)
    g = layer._compute_gate(a)
    assert isinstance(layer._fp32_params, SSMGate) and torch.equal(
        layer._fp32_params(a), g
    )
    assert g.dtype == torch.float32 and g.shape == a.shape
    truth = -layer.A_log.double().exp() * F.softplus(
        a.double() + layer.dt_bias.double()
    )
    assert_close("gate", g, truth.clamp(min=-104), 1e-6)  # exp of less is 0 in fp32
    g.sum().backward()
    assert layer.A_log.grad.dtype == layer.dt_bias.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gate_is_valid_before_it_is_filled(dtype):
    gate = SSMGate(3, dtype)
    assert [(n, tuple(p.shape), p.dtype) for n, p in gate.named_parameters()] == [
        ("A_log", (3,), dtype),
        ("dt_bias", (3,), dtype),
    ]
    rows = torch.zeros(1, 3, dtype=dtype)
    torch.testing.assert_close(gate(rows), -F.softplus(rows + 1))
    with pytest.raises(ValueError, match=r"gates of dtype torch\.bfloat16"):
        SSMGate(3, torch.bfloat16)


def test_bare_parameters_move_into_the_holder_as_the_same_objects():
    module = torch.nn.Module()
    A_log = module.A_log = torch.nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
    dt_bias = module.dt_bias = torch.nn.Parameter(torch.randn(3))
    A_log.grad = torch.randn(3, dtype=torch.bfloat16)
    before = A_log.detach().clone(), dt_bias.detach().clone(), dt_bias.data_ptr()
    gradient = A_log.grad
    gate = install_ssm_gate(module)
    assert A_log.grad.dtype == torch.float32 and torch.equal(
        A_log.grad, gradient.float()
    )
    assert gate is module._fp32_params and not module._parameters
    assert gate.A_log is A_log and gate.dt_bias is dt_bias
    assert torch.equal(A_log, before[0].float()) and A_log.dtype == torch.float32
    assert torch.equal(dt_bias, before[1]) and dt_bias.data_ptr() == before[2]
    with pytest.raises(KeyError):
        install_ssm_gate(module)


def test_gates_to_shard_are_asked_for_by_name():
    with pytest.raises(ValueError, match="Linear has no fp32 gates to shard; patch it"):
        shard_gates(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("family", [*FAMILIES, VISION, VISION_MOE, GLM])
def test_a_saved_model_loads_in_transformers_and_comes_back_bit_for_bit(
    fresh, family, tmp_path
):
    model = fresh(family)
    source = fresh(family)
    patch(model)
    model.save_pretrained(tmp_path)
    theirs = type(source).from_pretrained(tmp_path, dtype=torch.float32)
    assert_same_file(theirs.state_dict(), source.state_dict())
    theirs.save_pretrained(tmp_path / "back")
    back = type(source).from_pretrained(tmp_path / "back", dtype=torch.float32)
    patch(back)
    assert_same_file(back.state_dict(), model.state_dict())
    model.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("family", [DENSE, KIMI])
def test_a_bf16_model_keeps_the_gates_of_its_file(fresh, tmp_path, family):
    source = fresh(family)
    source.save_pretrained(tmp_path)
    with gates_in_fp32():
        model = type(source).from_pretrained(tmp_path, dtype=torch.bfloat16)
    patch(model)
    parameters = dict(model.named_parameters())
    file = dict(source.named_parameters())
    held = [name for name in parameters if name.endswith(("A_log", "dt_bias"))]
    assert len(held) == 6
    assert all(torch.equal(parameters[name], file[name]) for name in held)
    rounded = type(source).from_pretrained(tmp_path, dtype=torch.bfloat16)
    outside = {name: p.dtype for name, p in rounded.named_parameters()}
    assert all(
        dtype == torch.bfloat16 for name, dtype in outside.items() if "A_log" in name
    )
    rest = {name: p.dtype for name, p in parameters.items() if name not in held}
    assert rest.items() <= outside.items() and torch.bfloat16 in rest.values()


def test_gates_stay_fp32_in_a_class_that_names_other_parameters_that_do(
    fresh, tmp_path, monkeypatch
):
    """Kimi Linear's class does since transformers 5.24; dt_bias is among them, A_log is
    not."""
    source = fresh(DENSE)
    source.save_pretrained(tmp_path)
    cls = type(source)
    (base,) = (one for one in cls.__mro__ if one.__name__ == "Qwen3_5PreTrainedModel")
    monkeypatch.setattr(base, "_keep_in_fp32_modules_strict", ["q_norm"])
    with gates_in_fp32():
        model = cls.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert len(kept) == 7
    assert all(name.endswith(("A_log", "dt_bias", "q_norm.weight")) for name in kept)
    later = cls.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert sum(p.dtype == torch.float32 for p in later.parameters()) == 1


@pytest.mark.parametrize("unpacked", ["transformers", "fused"])
@pytest.mark.parametrize("family", [DENSE, KIMI, VISION])
@torch.no_grad()
def test_a_step_on_a_cache_is_that_of_the_unpatched_model(fresh, family, unpacked):
    """Also after padding: a mask of the whole sequence comes with one token."""
    ours = fresh(family)
    theirs = fresh(family)
    patch(ours, unpacked=unpacked)
    tokens = torch.randint(1, 67, (2, 5))
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    steps = []
    for model in (ours, theirs):
        name = cache_name(model)
        cache = model(tokens, attention_mask=mask[:, :5], use_cache=True)[name]
        steps.append(model(tokens[:, :1], attention_mask=mask, **{name: cache}).logits)
    assert torch.equal(*steps)


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize(
    ("unpacked", "use_cache"),
    [("transformers", True), ("fused", True), ("fused", False)],
)
@pytest.mark.parametrize("family", [*FAMILIES, VISION, GLM])
def test_generation_is_that_of_the_unpatched_model(fresh, family, unpacked, use_cache):
    """Without a cache every token is the mixer's."""
    ours = fresh(family)
    theirs = fresh(family)
    patch(ours, unpacked=unpacked)
    tokens = torch.randint(1, 67, (2, 5))  # 0 is padding
    mask = torch.ones_like(tokens)
    mask[0, :2] = int(not use_cache)
    settings = {"max_new_tokens": 6 if use_cache else 12, "use_cache": use_cache}
    settings |= {"do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    assert torch.equal(
        ours.generate(tokens, **settings), theirs.generate(tokens, **settings)
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_recomputes_with_the_same_boundaries(fresh, reentrant):
    """Two forwards before the backwards: what is recomputed belongs to its own
    batch."""
    plain = fresh(DENSE).train()
    again = fresh(DENSE).train()
    for model in (plain, again):
        patch(model)
    enable = getattr(again, "activation_checkpointing_enable", None)
    enable = enable or again.gradient_checkpointing_enable  # before transformers 5.23
    enable({"use_reentrant": reentrant})
    again.enable_input_require_grads()
    tokens = torch.randint(67, (1, 8))
    boundaries = (
        torch.tensor([[1, 1, 1, 2, 2, 2, 2, 2]]),
        torch.tensor([[1, 2, 2, 2, 2, 2, 3, 3]]),
    )
    for model in (plain, again):
        losses = [
            model(tokens, labels=tokens, _packed_seq_ids=ids, use_cache=False).loss
            for ids in boundaries
        ]
        for loss in losses:
            loss.backward()
    for (name, one), other in zip(
        plain.named_parameters(), again.parameters(), strict=True
    ):
        assert_close(name, other.grad, one.grad, 1e-6)
