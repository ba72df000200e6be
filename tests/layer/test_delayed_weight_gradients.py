"""Weight gradients that wait for ``backward_dw``, as in Megatron's overlap."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megatron_gdn.specs import gated_delta_net_spec, kimi_delta_attention_spec
from tests.distributed.layer_laws import transformer_layer
from tests.parallel import make_config

pytestmark = pytest.mark.usefixtures("one_rank")


def delayed(linear: type) -> type:
    """The class with a backward that leaves the weight's gradient to
    ``backward_dw``."""

    class Delayed(linear):
        def forward(self, x):
            y = F.linear(x, self.weight.detach())
            if y.requires_grad:
                y.register_hook(lambda dy: setattr(self, "waits", (x.detach(), dy)))
            return y, None

        def backward_dw(self):
            x, dy = self.waits
            self.weight.grad = dy.flatten(0, 1).T @ x.flatten(0, 1)

    return Delayed


def layer_of(mixer, **recomputed):
    config = make_config(hidden_dropout=0.0)
    vars(config).update(recomputed)
    torch.manual_seed(3)
    return transformer_layer(config, mixer)


@pytest.mark.parametrize("spec", [gated_delta_net_spec, kimi_delta_attention_spec])
@pytest.mark.parametrize("again", [None, "gdn_norm_out", "gdn"])
def test_megatrons_schedule_gets_the_weight_gradients_of_projections_later(again, spec):
    plain = spec("local")
    linears = {
        "in_proj": delayed(ColumnParallelLinear),
        "out_proj": delayed(RowParallelLinear),
    }
    if spec is kimi_delta_attention_spec:
        linears["beta_proj"] = delayed(ColumnParallelLinear)
    parts = replace(plain.submodules, **linears)
    recomputed = {"recompute_granularity": "selective", "recompute_modules": [again]}
    late = layer_of(replace(plain, submodules=parts), **(recomputed if again else {}))
    at_once = layer_of(plain)
    x = torch.randn(9, 2, 24)
    at_once.load_state_dict(late.state_dict())
    for layer in (late, at_once):
        out, _ = layer(x.clone().requires_grad_(), None)
        out.square().sum().backward()
    weights = {f"self_attention.{name}.weight" for name in linears}
    missing = {name for name, p in late.named_parameters() if p.grad is None}
    assert missing == weights
    late.init_backward_dw_wrapper()
    late.backward_dw_wrapper.backward_dw()
    for name, parameter in late.named_parameters():
        torch.testing.assert_close(
            parameter.grad, at_once.get_parameter(name).grad, msg=name
        )
