"""What is computed again in either scheme."""

import gc
import weakref
from unittest.mock import patch

import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random

from tests.distributed.layer_laws import (
    forward_backward,
    layer_with,
    randomise_,
    require_same_bits,
    thd,
)
from tests.parallel import groups_of_megatron, make_config
from tests.ranks import on_ranks


@pytest.mark.each_value
@pytest.mark.parametrize(
    "called", [False, True], ids=["fused norm", "norm as a module"]
)
@pytest.mark.parametrize(
    "options", [{"recompute": "light"}, {"recompute": "full"}], ids=str
)
@pytest.mark.parametrize(
    ("cp", "mode"), [(1, "auto"), (2, "headwise"), (2, "chunkwise")]
)
@on_ranks(cp="cp")
def test_the_norm_is_recomputed_without_megatrons_extension(cp, mode, options, called):
    """No bit changes, the output is gone meanwhile, and the layer keeps nothing of
    it."""
    groups = groups_of_megatron()
    config = make_config(context_parallel_size=cp)
    saved = layer_with(config, groups, called, linear_cp_mode=mode)
    randomise_(saved)
    again = layer_with(config, groups, called, linear_cp_mode=mode, **options)
    again.load_state_dict(saved.state_dict())
    x = torch.randn(48 // cp, 1, 24)
    packed = thd((16, 32))
    mixed = []
    again.out_proj.register_forward_pre_hook(lambda module, args: mixed.append(args[0]))

    def run(*args, **kwargs):
        out = again(*args, **kwargs)
        assert mixed[0].untyped_storage().nbytes() == 0, "not dropped"
        return out

    expected = forward_backward(saved, x, packed)
    assert saved.norm_out_checkpoint is None
    build = AssertionError("Megatron builds an extension")
    with patch.object(megatron_random, "_get_share_storage", side_effect=build):
        require_same_bits(forward_backward(again, x, packed, run=run), expected)
    assert again.norm_out_checkpoint is not None
    kept = weakref.ref(mixed.pop())
    gc.collect()
    assert kept() is None, "the layer keeps the output"
    again.eval()(x, None, packed_seq_params=packed)
    assert again.norm_out_checkpoint is None
    again.train().requires_grad_(False)  # frozen: nothing is freed, for no backward
    out, _ = again(x, None, packed_seq_params=packed)
    assert torch.equal(out, expected["output"])


@on_ranks(cp=2)
def test_a_micro_batch_without_tokens_has_nothing_to_compute_again():
    config = make_config(context_parallel_size=2)
    for mode in ("headwise", "chunkwise"):
        layer = layer_with(
            config, groups_of_megatron(), False, linear_cp_mode=mode, recompute="light"
        )
        out, _ = layer(torch.zeros(0, 1, 24), None)
        assert out.shape == (0, 1, 24)
        out.sum().backward()
        assert layer.in_proj.weight.grad.eq(0).all()
