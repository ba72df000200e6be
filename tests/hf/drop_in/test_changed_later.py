"""What is changed in a patched model counts from its next forward, or is refused by name."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from megatron_gdn.hf import patch
from tests.hf.drop_in.conftest import DENSE, FAMILIES, NEXT, VISION
from tests.parallel import assert_close

LENGTHS = (5, 7, 3)
OFFSETS = torch.tensor((0, *LENGTHS)).cumsum(0)
IDS = torch.repeat_interleave(torch.arange(1, 4), torch.tensor(LENGTHS))[None]
SOURCES = {
    "offsets": {"cu_seq_lens_q": OFFSETS},
    "ids": {"_packed_seq_ids": IDS},
    "mask": {"attention_mask": IDS},
    "positions": {"position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]},
    "nothing": {},
}
TOKENS = torch.arange(sum(LENGTHS))[None]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("family", [NEXT, DENSE])
@torch.no_grad()
def test_a_forward_called_without_its_module_knows_the_documents(fresh, family, source):
    text = fresh(family).model
    patch(text)
    expected = text(TOKENS, **SOURCES[source], use_cache=False)
    found = text.forward(TOKENS, **SOURCES[source], use_cache=False)
    assert torch.equal(found.last_hidden_state, expected.last_hidden_state)


@pytest.mark.parametrize("family", [*FAMILIES, VISION])
@torch.no_grad()
def test_a_copy_of_a_patched_model_runs_its_own_parameters(patched, family):
    model = patched(family)
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.zero_()
    assert model(TOKENS, use_cache=False).logits.any()
    assert not other(TOKENS, **SOURCES["offsets"], use_cache=False).logits.any()


def test_a_forward_that_was_on_the_model_runs_inside_and_is_back_after_undo(fresh):
    text, calls = fresh(DENSE).model, []
    own = text.forward
    text.forward = lambda *args, **kwargs: calls.append(kwargs) or own(*args, **kwargs)
    theirs = text.forward
    with patch(text):
        text(TOKENS, **SOURCES["ids"], use_cache=False)
        assert "gdn_batch" in calls[0]
    assert text.forward is theirs
    with patch(text):
        pass
    del text.forward
    with patch(text):
        text.forward(TOKENS, use_cache=False)
    assert "forward" not in vars(text)


def test_a_patch_whose_forward_was_wrapped_is_not_undone_around_it(fresh):
    text = fresh(DENSE).model
    patched = patch(text)
    ours = text.forward
    text.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    with pytest.raises(RuntimeError, match="was replaced since it was patched"):
        patched.undo()
    text(TOKENS, **SOURCES["ids"], use_cache=False)
    text.forward = ours
    patched.undo()


def layer_of(model):
    return model.model.layers[0].linear_attn


def test_another_activation_is_refused(patched):
    model = patched()
    layer_of(model).activation = "gelu"
    with pytest.raises(ValueError, match=r"activation='gelu'"):
        model(TOKENS, **SOURCES["offsets"], use_cache=False)


class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.base_layer, self.weight, self.bias = module, module.weight, module.bias

    def forward(self, x):
        return 2 * self.base_layer(x)


def test_a_convolution_that_was_wrapped_is_refused(patched):
    model = patched()
    layer_of(model).conv1d = Wrapped(layer_of(model).conv1d)
    with pytest.raises(NotImplementedError, match="conv1d is a Wrapped"):
        model(TOKENS, **SOURCES["offsets"], use_cache=False)


def forward_of_all_instances(norm, monkeypatch):
    forward = type(norm).forward
    doubled = lambda self, x, gate=None: 2 * forward(self, x, gate)  # noqa: E731
    monkeypatch.setattr(type(norm), "forward", doubled)


def hook_of_all_modules(norm, monkeypatch):
    hook = register_module_forward_hook(lambda module, args, y: 2 * y if module is norm else None)
    monkeypatch.setattr(norm, "remove_hook", hook.remove, raising=False)


@pytest.mark.parametrize("change", [forward_of_all_instances, hook_of_all_modules])
@pytest.mark.parametrize("family", [NEXT, DENSE])
@torch.no_grad()
def test_a_norm_that_was_changed_for_all_modules_is_called(patched, family, change, monkeypatch):
    model = patched(family)
    layer, x = layer_of(model), torch.randn(1, sum(LENGTHS), 24)
    expected = 2 * layer(x, cu_seqlens=OFFSETS)
    change(layer.norm, monkeypatch)
    try:
        assert_close("output", layer(x, cu_seqlens=OFFSETS), expected, 1e-6)
    finally:
        getattr(layer.norm, "remove_hook", lambda: None)()
