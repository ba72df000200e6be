"""What is computed again, and padded batches, in either scheme."""

import gc
import weakref
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random as megatron_random

from megatron_gdn import pack_rows, unpack_rows
from megatron_gdn.context_parallel import local_indices
from tests.distributed.layer_laws import (
    forward_backward,
    layer_with,
    randomise_,
    require_same_bits,
    thd,
)
from tests.distributed.mixers import GDN
from tests.parallel import assert_close, groups_of_megatron, make_config
from tests.ranks import on_ranks


@pytest.mark.parametrize("called", [False, True], ids=["fused norm", "norm as a module"])
@pytest.mark.parametrize("options", [{"recompute_norm_out": True}, {"recompute": "full"}], ids=str)
@pytest.mark.parametrize(("cp", "mode"), [(1, "auto"), (2, "headwise"), (2, "chunkwise")])
@on_ranks(cp="cp")
def test_the_norm_is_recomputed_without_megatrons_extension(cp, mode, options, called):
    """No bit changes, the output is gone meanwhile, and the layer keeps nothing of it."""
    groups, config = groups_of_megatron(), make_config(context_parallel_size=cp)
    saved = layer_with(config, groups, called, linear_cp_mode=mode)
    randomise_(saved)
    again = layer_with(config, groups, called, linear_cp_mode=mode, **options)
    again.load_state_dict(saved.state_dict())
    x, packed, mixed = torch.randn(48 // cp, 1, 24), thd((16, 32)), []
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


@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
@pytest.mark.parametrize("cp", [2, 4])
@on_ranks(cp="cp")
def test_a_padded_batch_over_ranks_equals_one_rank(cp, mode):
    """Output, input gradient and every parameter's gradient equal one rank's without slots."""
    mask = torch.tensor([[1] * 9 + [0] * 4, [1] * 2 + [3] * 11])
    one = GDN.whole(GDN.config())
    x = torch.randn(13, 2, one.hidden_size)
    x[9:, 0] = torch.nan
    x.requires_grad_()
    weight = torch.randn_like(x)
    packed, params = pack_rows(x, mask)
    y = unpack_rows(one(packed, None, packed_seq_params=params)[0], mask)
    (y * weight).sum().backward()

    groups = groups_of_megatron()
    layer = GDN.build(GDN.config(context_parallel_size=cp), groups, linear_cp_mode=mode)
    GDN.copy_shares(layer, one)
    x_all = x.detach().requires_grad_()
    packed, params = pack_rows(x_all, mask, multiple_of=2 * cp)
    slots = params.cu_seqlens_q_padded.diff().tolist()
    mine = local_indices(slots, cp, groups.cp.rank())
    y_mine, _ = layer(packed[mine], None, packed_seq_params=params)
    weight_mine = pack_rows(weight, mask, multiple_of=2 * cp)[0][mine]  # 0 at a slot's end
    (y_mine * weight_mine).sum().backward()

    y_all = torch.zeros_like(packed).index_copy(0, mine, y_mine.detach())
    for tensor in (y_all, x_all.grad, *(p.grad for p in layer.parameters())):
        dist.all_reduce(tensor.detach(), group=groups.cp)
    assert_close("output", unpack_rows(y_all, mask, multiple_of=2 * cp), y, GDN.tolerance)
    assert_close("input gradient", x_all.grad, x.grad, GDN.tolerance)
    for name, parameter in layer.named_parameters():
        expected = GDN.share(name, one.get_parameter(name).grad, layer)
        assert_close(f"gradient of {name}", parameter.grad, expected, GDN.tolerance)
