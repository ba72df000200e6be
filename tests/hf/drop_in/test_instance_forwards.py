"""A patch counts where an instance has a forward of its own: accelerate's hooks,
offloaded weights.

Everything runs on the CPU, where the hooks run too.
"""

import pytest
import torch

from megatron_gdn.hf import patch
from tests.hf.drop_in.conftest import DENSE, KIMI, NEXT, mixer_of
from tests.parallel import assert_close

accelerate = pytest.importorskip("accelerate")

TOKENS = torch.randint(67, (2, 9), generator=torch.Generator().manual_seed(1))
IDS = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 0, 0], [1, 2, 2, 2, 2, 2, 2, 2, 3]])


def dispatch(model):
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)


def offload(model):
    accelerate.cpu_offload(model, torch.device("cpu"))


def preload(model):
    """Whole linear attentions are loaded before their forwards."""
    names = [type(mixer_of(model)).__name__]
    accelerate.cpu_offload(model, torch.device("cpu"), preload_module_classes=names)


@torch.no_grad()
def logits(model) -> list[torch.Tensor]:
    told = ({}, {"_packed_seq_ids": IDS}, {"attention_mask": (IDS > 0).long()})
    return [model(TOKENS, use_cache=False, **each).logits for each in told]


def assert_close_in_fp32(found, expected) -> None:
    """Under accelerate's hooks the layer calls its norm's module, whose products are
    rounded in another order: some units of fp32 in each layer."""
    for a, b in zip(found, expected, strict=True):
        assert_close("logits", a, b, 100 * torch.finfo(torch.float32).eps)


def assert_same(found, expected) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.each_pair
@pytest.mark.parametrize("unpacked", ["transformers", "fused"])
@pytest.mark.parametrize("order", ["hooks first", "patch first"])
@pytest.mark.parametrize("place", [dispatch, offload, preload])
@pytest.mark.parametrize("family", [DENSE, NEXT, KIMI])
def test_a_model_with_accelerates_hooks_runs_the_mixer(
    fresh, family, place, order, unpacked
):
    expected = fresh(family)
    model = fresh(family)
    plain = logits(fresh(family))[0]
    patch(expected, unpacked=unpacked)
    if order == "hooks first":
        place(model)
    patched = patch(model, unpacked=unpacked)
    if order == "patch first":
        place(model)
    assert_close_in_fp32(logits(model), logits(expected))
    patched.undo()
    assert torch.equal(logits(model)[0], plain)


@pytest.mark.each_value
@pytest.mark.parametrize("order", ["hooks first", "patch first"])
@pytest.mark.parametrize("place", [dispatch, offload])
def test_hooks_that_are_removed_leave_the_patch(fresh, place, order):
    expected = fresh(DENSE)
    model = fresh(DENSE)
    plain = logits(fresh(DENSE))[0]
    patch(expected)
    if order == "hooks first":
        place(model)
    patched = patch(model)
    if order == "patch first":
        place(model)
    accelerate.hooks.remove_hook_from_submodules(model)
    assert_same(logits(model), logits(expected))
    patched.undo()
    assert torch.equal(logits(model)[0], plain)
    # bound forwards of transformers' classes are still on the modules
    with patch(model):
        assert_same(logits(model), logits(expected))


def test_gates_of_an_offloaded_16_bit_model_are_fp32(fresh):
    expected = fresh(DENSE).bfloat16()
    model = fresh(DENSE).bfloat16()
    offload(model)
    for one in (expected, model):
        patch(one)
    assert mixer_of(model).A_log.dtype == torch.float32
    assert torch.equal(logits(model)[0], logits(expected)[0])


def test_a_forward_that_would_hide_the_mixer_is_refused(fresh):
    model = fresh(DENSE)
    before = logits(fresh(DENSE))[0]
    layer = model.model.layers[2].linear_attn
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs)
    with pytest.raises(
        ValueError, match="Qwen3_5GatedDeltaNet has a forward of its own"
    ):
        patch(model)
    assert torch.equal(logits(model)[0], before)
    offload(model)
    with pytest.raises(
        ValueError, match="Qwen3_5GatedDeltaNet has a forward of its own"
    ):
        patch(model)


def test_a_forward_that_was_set_later_is_not_undone(fresh):
    model = fresh(DENSE)
    patched = patch(model)
    layer = mixer_of(model)
    ours = layer.forward
    layer.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    with pytest.raises(
        RuntimeError, match="linear_attn was replaced since it was patched"
    ):
        patched.undo()
    del layer.forward
    patched.undo()


def test_a_norm_of_torchscript_is_called(fresh):
    """Its class has no forward to be known by."""
    model, traced = (fresh(DENSE) for _ in range(2))
    for one in (model, traced):
        patch(one)
    mixer = mixer_of(traced)
    rows = torch.randn(2, 3, mixer.head_v_dim)
    mixer.norm = torch.jit.trace(mixer.norm, (rows, rows))
    assert_close_in_fp32(logits(traced), logits(model))
