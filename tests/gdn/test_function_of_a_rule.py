"""The rule as a function, by the stages of a layer's rule, against the plain rule's own autograd
function, which has another backward."""

import pytest
import torch

from megatron_gdn.gdn.api import gated_delta_rule, run_rule
from megatron_gdn.ops.delta_rule.base import RuleInputs
from megatron_gdn.ops.delta_rule.chunk import torch_chunk_gated_delta_rule
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.documents import Documents
from tests.ops.delta_rule.test_gated_delta_rule import make_inputs

NAMES = ("q", "k", "v", "g", "beta", "state")
OFFSETS = (0, 3, 3, 70, 71, 71, 130)  # with empty documents


class ValueHeads(PlainRule):
    """As GPU kernels: a gradient of q and k for every value head, doubled, with a factor of 1/2."""

    def begin_backward(self, d_o, inputs, saved, documents):
        begun = super().begin_backward(d_o, inputs, saved, documents)
        run = begun.run

        def per_value_head(*states):
            grads = run(*states)
            share = inputs.v.shape[2] // inputs.k.shape[2]
            q, k = (x.repeat_interleave(share, dim=2) / share for x in grads[:2])
            doubled = (x * 2 for x in (q, k, *grads[2:5]))
            factor = torch.full((inputs.v.shape[2],), 0.5, dtype=torch.float64)
            return type(grads)(*doubled, factor)

        begun.run = per_value_head
        return begun


def found(call, inputs, **options):
    leaves = [x.clone().requires_grad_() for x in inputs]
    o, final = call(leaves, initial_state=leaves[5], output_final_state=True, **options)
    make = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=make, dtype=x.dtype) for x in (o, final)]
    grads = torch.autograd.grad((o, final), leaves, weights)
    return {"output": o, "final": final, **dict(zip(NAMES, grads, strict=True))}


@pytest.mark.parametrize("offsets", [None, OFFSETS], ids=["batch", "packed"])
@pytest.mark.parametrize("rule", [PlainRule(), ValueHeads()], ids=["plain", "per value head"])
@pytest.mark.parametrize("options", [{}, {"scale": 0.3, "use_qk_l2norm_in_kernel": True}],
                         ids=["", "scale and l2norm"])  # fmt: skip
def test_a_rule_as_a_function_equals_the_plain_one(rule, offsets, options):
    sequences = None if offsets is None else len(offsets) - 1
    B, T = (2, 70) if offsets is None else (1, offsets[-1])
    extra = {} if sequences is None else {"sequences": sequences}
    inputs = make_inputs(B, T, 2, 4, 8, 6, 1.0, **extra)
    documents = None if offsets is None else Documents(offsets, torch.device("cpu"))

    def staged(x, **states):
        return run_rule(rule, RuleInputs(*x[:5]), documents, **states, **options)

    def plain(x, **states):
        return torch_chunk_gated_delta_rule(*x[:5], cu_seqlens=documents, **states, **options)

    got, expected = found(staged, inputs), found(plain, inputs)
    for name, exact in expected.items():
        torch.testing.assert_close(
            got[name], exact, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_function_and_the_layer_know_the_same_names():
    q, k, v, g, beta, _ = make_inputs(1, 10, 2, 4, 8, 8, 1.0, dtype=torch.float32)
    with pytest.raises(ValueError, match="'auto', 'recurrent' or one of 'flash_qla', 'fla', 'ref"):
        gated_delta_rule(q, k, v, g, beta, backend="cuda")
    for name in ("flash_qla", "fla"):
        with pytest.raises(ValueError, match="runs on a GPU, not on cpu"):
            gated_delta_rule(q, k, v, g, beta, backend=name)
