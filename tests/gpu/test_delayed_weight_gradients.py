"""On one GPU with Transformer Engine: weight gradients that wait for ``backward_dw``."""

import pytest
import torch

from tests.gpu.test_one_gpu import config_for

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("again", [None, "gdn_norm_out", "gdn"])
def test_delayed_weight_gradients_have_the_bits_of_those_at_once(world, again):
    pytest.importorskip("transformer_engine")
    from megatron.core.transformer.spec_utils import build_module

    from megatron_gdn.specs import gated_delta_net_spec

    def layer(delayed: bool):
        config = config_for()
        # Its constructor asks for experts beside it, which one layer does not have.
        config.delay_wgrad_compute = delayed
        if again:
            config.recompute_granularity, config.recompute_modules = "selective", [again]
        torch.manual_seed(3)
        return build_module(gated_delta_net_spec("te"), config, layer_number=1).cuda()

    late, at_once = layer(delayed=True), layer(delayed=False)
    at_once.load_state_dict(late.state_dict())
    x = torch.randn(256, 2, 256, device="cuda", dtype=torch.bfloat16)
    for one in (late, at_once):
        out, _ = one(x.clone().requires_grad_(), None)
        out.float().square().sum().backward()
    missing = {name for name, p in late.named_parameters() if p.grad is None}
    assert missing == {"in_proj.weight", "out_proj.weight"}
    late.backward_dw()
    for name, parameter in late.named_parameters():
        assert torch.equal(parameter.grad, at_once.get_parameter(name).grad), name
