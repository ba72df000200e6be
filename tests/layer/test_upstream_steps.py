"""The steps that tools look up on megatron-core's layer give what its own functions give."""

import pytest
import torch
from megatron.core.ssm import gated_delta_net as upstream
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as Upstream

from megatron_gdn.ops import l2norm
from tests.distributed.layer_laws import build
from tests.parallel import make_config

pytestmark = pytest.mark.usefixtures("one_rank")
B, S, G, H, K, V = 2, 7, 4, 8, 8, 12  # of tests.parallel.SIZES


def steps(width):
    """Convolved rows, the gate and the two gate features, none of them contiguous."""
    shapes = (width, H * V, H, H)
    qkv, gate, beta, alpha = (torch.randn(S, B, n).transpose(0, 1) for n in shapes)
    return qkv, gate.unflatten(-1, (H, V)), beta, alpha


@pytest.mark.skipif(
    hasattr(Upstream, "_compute_gates"),
    reason="later than 0.19 the step computes the gates too, and its arguments are others",
)
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("value_heads", [8, 4], ids=["shared key heads", "one each"])
def test_the_rules_inputs(monkeypatch, normalise, value_heads):
    # fla's needs a GPU. In 0.18 the layer is one file.
    monkeypatch.setattr(getattr(upstream, "common", upstream), "l2norm", l2norm)
    layer = build(make_config(linear_num_value_heads=value_heads), use_qk_l2norm=normalise)
    qkv, gate, beta, alpha = steps(2 * G * K + value_heads * V)
    gate, beta, alpha = gate[:, :, :value_heads], beta[..., :value_heads], alpha[..., :value_heads]
    with torch._dynamo.config.patch(disable=True):
        if hasattr(Upstream, "_prepare_input_for_gated_delta_rule"):
            arguments = qkv, gate, B, S, beta, alpha
            expected = Upstream._prepare_input_for_gated_delta_rule(layer, *arguments)
        else:  # 0.18
            arguments = qkv, gate, beta, alpha, B, S
            expected = Upstream._prepare_qkv_for_gated_delta_rule(layer, *arguments)
    assert expected[0].shape == (B, S, value_heads, K)
    for found in (
        layer._prepare_input_for_gated_delta_rule(qkv, gate, B, S, beta, alpha),
        layer._prepare_qkv_for_gated_delta_rule(qkv, gate, beta, alpha, B, S),
    ):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other) and one.is_contiguous()
