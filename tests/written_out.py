"""Whole mixers by their references, token by token: what a forward is held to."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_gdn import (
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    KimiDeltaAttention,
    Mamba2Mixer,
)
from megatron_gdn.gdn.reference import gated_delta_net
from megatron_gdn.gdn2.reference import gated_delta_net2
from megatron_gdn.gdp.reference import gated_delta_product
from megatron_gdn.kda.reference import kimi_delta_attention
from megatron_gdn.mamba2 import reference as mamba2_reference

REFERENCES = {
    GatedDeltaNet: gated_delta_net,
    GatedDeltaNet2: gated_delta_net2,
    GatedDeltaProduct: gated_delta_product,
    KimiDeltaAttention: kimi_delta_attention,
    Mamba2Mixer: mamba2_reference.mamba2,
}
# A reference's keyword arguments that are attributes of its mixer.
OPTIONS = {
    GatedDeltaNet: ("use_qk_l2norm", "output_gate_activation", "allow_neg_eigval"),
    GatedDeltaNet2: ("use_qk_l2norm",),
    GatedDeltaProduct: ("norm_eps",),
    KimiDeltaAttention: ("use_qk_l2norm", "gate_lower_bound"),
    Mamba2Mixer: ("rmsnorm", "dt_limit"),
}


def written_out(
    mixer, x: Tensor, lengths, added=None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output in the dtype of ``x``, differentiable, and the parameters that it was
    made of.

    ``added(o, z)`` is added to what Mamba2's norm gives.
    """
    p = {
        name: t.detach().to(x.dtype).requires_grad_()
        for name, t in mixer.named_parameters()
    }
    options = {name: getattr(mixer, name) for name in OPTIONS[type(mixer)]}
    if isinstance(mixer, Mamba2Mixer):
        if mixer.rmsnorm:
            options["norm_eps"] = mixer.norm.eps
    elif hasattr(mixer, "out_norm"):
        options["norm_eps"] = mixer.out_norm.eps
        options["zero_centered_norm"] = getattr(
            mixer.out_norm, "zero_centered_gamma", False
        )
    reference = REFERENCES[type(mixer)]
    outputs = []
    for u_SBD in x.split([n for n in lengths if n]):
        rows = []
        for u_SD in u_SBD.unbind(1):
            y_SD = reference(u_SD, p, mixer.dims, **options)
            if added is not None:
                o, z = mamba2_reference.recurrence_and_gate(
                    u_SD, p, mixer.dims, mixer.dt_limit
                )
                y_SD = y_SD + F.linear(added(o, z), p["out_proj.weight"])
            rows.append(y_SD)
        outputs.append(torch.stack(rows, dim=1))
    return torch.cat(outputs), p
