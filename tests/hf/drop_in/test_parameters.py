"""A patched model has transformers' parameters: their order, their names, one owner for
each."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from megatron_gdn.hf import SSMGate, patch
from megatron_gdn.hf.drop_in.gates import gate_owner
from tests.hf.drop_in.conftest import DENSE, FAMILIES, GLM, KIMI, VISION, mixer_of

TOKENS = torch.randint(67, (1, 9), generator=torch.Generator().manual_seed(1))
IDS = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 2, 2]])


def loss_of(model, **told):
    return model(TOKENS, labels=TOKENS, use_cache=False, **told).loss


@pytest.mark.parametrize("family", [*FAMILIES, VISION, GLM])
def test_a_patched_model_has_the_names_and_the_order_of_transformers(fresh, family):
    theirs = fresh(family)
    ours = fresh(family)
    patch(ours)
    for settings in ({}, {"remove_duplicate": False}):
        expected = [name for name, _ in theirs.named_parameters(**settings)]
        assert [name for name, _ in ours.named_parameters(**settings)] == expected
    for settings in ({"recurse": False}, {"remove_duplicate": False}):
        expected, found = (
            [name for name, _ in mixer_of(one).named_parameters(**settings)]
            for one in (theirs, ours)
        )
        assert found == expected
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
    names = [
        [name for name, _ in model.named_children()]
        for model in map(mixer_of, (ours, theirs))
    ]
    assert names[0] == names[1]


@pytest.mark.parametrize("family", [DENSE, KIMI])
@torch.no_grad()
def test_a_vector_of_transformers_parameters_fits_a_patched_model(fresh, family):
    theirs = fresh(family)
    ours = fresh(family)
    for parameter in theirs.parameters():
        parameter.mul_(1.25)
    patch(ours)
    vector_to_parameters(parameters_to_vector(theirs.parameters()), ours.parameters())
    assert torch.equal(ours(TOKENS).logits, theirs(TOKENS).logits)


@pytest.mark.parametrize("family", [DENSE, KIMI])
def test_an_optimizer_resumes_across_the_patch(fresh, family):
    theirs = fresh(family)
    ours = fresh(family)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    loss_of(theirs).backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    values = copy.deepcopy(theirs.state_dict())
    patch(ours)
    ours.load_state_dict(values)
    resumed = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    resumed.load_state_dict(state)
    for model, one in ((theirs, optimizer), (ours, resumed)):
        one.zero_grad()
        loss_of(model).backward()
        one.step()
    for (name, one), other in zip(
        theirs.named_parameters(), ours.parameters(), strict=True
    ):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("family", [DENSE, KIMI])
def test_distributed_checkpoints_have_the_keys_of_transformers(fresh, family):
    theirs = fresh(family)
    ours = fresh(family)
    patch(ours)
    made = []
    for model in (theirs, ours):
        optimizer = torch.optim.AdamW(model.parameters())
        loss_of(model).backward()
        optimizer.step()
        made.append(
            (get_model_state_dict(model), get_optimizer_state_dict(model, optimizer))
        )
    (expected, expected_state), (found, found_state) = made
    assert list(found) == list(expected)
    assert list(found_state["state"]) == list(expected_state["state"])
    assert found_state["param_groups"] == expected_state["param_groups"]
    set_optimizer_state_dict(ours, optimizer, expected_state)


@pytest.mark.parametrize(
    "told", [{}, {"_packed_seq_ids": IDS}], ids=["plain", "packed"]
)
@pytest.mark.parametrize("family", [DENSE, KIMI])
@torch.no_grad()
def test_gates_that_are_replaced_count(fresh, family, told):
    """By `setattr`, in `_parameters` and by `functional_call`."""
    others = fresh(family)
    ours = fresh(family)
    for name, parameter in others.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            parameter.add_(0.5)
    values = {name: parameter.clone() for name, parameter in others.named_parameters()}
    patch(others)
    patch(ours)
    expected = others(TOKENS, use_cache=False, **told).logits
    before = ours(TOKENS, use_cache=False, **told).logits
    more = {"use_cache": False, **told}
    by_call = torch.func.functional_call(ours, values, (TOKENS,), more).logits
    assert torch.equal(by_call, expected) and not torch.equal(before, expected)
    assert torch.equal(ours(TOKENS, use_cache=False, **told).logits, before)
    for number, layer in enumerate(m for m in ours.modules() if hasattr(m, "drop_in")):
        owner = gate_owner(layer)
        prefix = f"model.layers.{number}."
        key = next(
            key for key in values if key.startswith(prefix) and key.endswith("A_log")
        )
        owner.A_log = nn.Parameter(values[key])
        owner._parameters["dt_bias"] = nn.Parameter(
            values[key.replace("A_log", "dt_bias")]
        )
        assert owner._fp32_params.A_log is owner.A_log
    assert torch.equal(ours(TOKENS, use_cache=False, **told).logits, expected)


@pytest.mark.parametrize("family", [DENSE, KIMI])
def test_each_gate_is_converted_once(patched, family):
    model = patched(family)
    owner = gate_owner(mixer_of(model))
    value = owner.A_log.detach().clone()
    for module, factor in ((model, 3), (owner, 5), (owner._fp32_params, 7)):
        module._apply(lambda tensor, factor=factor: tensor * factor)
        value *= factor
        assert torch.equal(owner.A_log, value)
    model.to("meta").to_empty(device="cpu")
    assert owner.A_log.device.type == "cpu" and owner._fp32_params.A_log is owner.A_log
    owner._fp32_params.bfloat16()
    assert owner.A_log.dtype == torch.float32


@pytest.mark.parametrize("prefix", ["", "layer"])
def test_a_holder_lists_its_two_parameters_under_a_prefix(patched, prefix):
    holder = gate_owner(mixer_of(patched(DENSE)))._fp32_params
    own = SSMGate(2)
    found, expected = (
        [name for name, _ in one.named_parameters(prefix)] for one in (holder, own)
    )
    assert found == expected


def test_keys_that_name_the_holder_are_loaded(fresh):
    source = fresh(DENSE)
    ours = fresh(DENSE)
    state = {}
    for key, value in source.state_dict().items():
        layer, _, name = key.rpartition(".")
        state[
            f"{layer}._fp32_params.{name}" if name in ("A_log", "dt_bias") else key
        ] = value + 1
    patch(ours)
    ours.load_state_dict(state)
    for key, value in source.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value + 1)


@pytest.mark.parametrize("family", [DENSE, KIMI])
def test_a_copy_owns_its_gates(patched, family):
    model = patched(family)
    owner, other = (gate_owner(mixer_of(one)) for one in (model, copy.deepcopy(model)))
    assert other._fp32_params.A_log is other.A_log and other.A_log is not owner.A_log


@pytest.mark.parametrize("family", [DENSE, KIMI])
def test_a_part_that_is_moved_is_returned(patched, family):
    """As torch's ``to`` and ``float`` return it."""
    assert all(part.float() is part for part in patched(family).modules())


@pytest.mark.parametrize("family", [DENSE, KIMI])
@torch.no_grad()
def test_16_bit_values_that_are_assigned_become_fp32(fresh, family):
    model = fresh(family)
    other = fresh(family)
    model.set_experts_implementation("eager")  # experts of 12 columns in bf16
    other.set_experts_implementation("eager")
    state = {key: value.bfloat16() for key, value in model.state_dict().items()}
    kept = dict(state)
    patch(model)
    patch(other)
    model.load_state_dict(state, assign=True)
    other.bfloat16().load_state_dict(state)
    assert all(value is kept[key] for key, value in state.items())
    owner = gate_owner(mixer_of(model))
    assert owner.A_log.dtype == owner.dt_bias.dtype == torch.float32
    assert torch.equal(owner.A_log, state[key_of(state, "A_log")].float())
    for told in ({}, {"_packed_seq_ids": IDS}):
        found, expected = (
            one(TOKENS, use_cache=False, **told).logits for one in (model, other)
        )
        assert torch.equal(found, expected)


def key_of(state, name: str) -> str:
    """The key of the first layer's gate parameter ``name``."""
    return next(key for key in state if key.endswith(name))


@pytest.mark.parametrize("family", [DENSE, KIMI])
def test_gates_that_were_replaced_by_rounded_ones_run_in_no_forward(fresh, family):
    model = fresh(family)
    patch(model, unpacked="transformers")
    owner = gate_owner(mixer_of(model))
    owner.A_log = nn.Parameter(owner.A_log.detach().bfloat16())
    for told in ({}, {"_packed_seq_ids": IDS}):
        with pytest.raises(ValueError, match="A_log reached the layer in torch.bfloa"):
            model(TOKENS, use_cache=False, **told)
