"""Padded batches over ranks; fp32 on gloo, tolerance as in ``test_layer_parallel``."""

import pytest
import torch
import torch.distributed as dist

from megatron_gdn import pack_rows, unpack_rows
from megatron_gdn.context_parallel import local_indices
from tests.distributed.mixers import GDN
from tests.parallel import assert_close, groups_of_megatron
from tests.ranks import on_ranks


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
