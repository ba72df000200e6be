"""The weights of a Kimi Delta Attention in Hugging Face's files and in Megatron.

Megatron's in_proj has the rows of :attr:`.sizes.KDADims.in_proj_layout`. Hugging Face
has a tensor for each section. The projection of a gate has low rank (Kimi Linear, GLM 5
next: f_a_proj and f_b_proj, g_a_proj and g_b_proj) or full rank (Bailing Hybrid:
f_proj, g_proj). Every tensor-parallel rank has f_a_proj, g_a_proj and beta_proj whole.

Modules of transformers hold the forget gate's tensors in ``forget_gate`` and have one
convolution. Keys of files have no ``forget_gate``, and files have three convolutions;
Bailing's files name o_proj "dense". Kimi Linear stores ``A_log`` as ``[1, 1, H, 1]``.
No tensor holds the lower bound of a gate: give the layer this bound as the option
`gate_lower_bound`.
"""

from __future__ import annotations

from typing import Literal

from ..mixers.tensor_map import TensorMap, conv_map, tensor_map
from .sizes import KDADims

KDAFamily = Literal["kimi_linear", "glm5_next", "bailing_hybrid"]


def kda_layer_maps(
    prefix: str,
    hf_prefix: str,
    dims: KDADims,
    family: KDAFamily,
    in_files: bool = True,
    zero_centered_gamma: bool = True,
) -> list[TensorMap]:
    """The maps between the two formats, for every parameter of one layer except its
    input norm.

    ``family`` is the ``model_type`` of the model. The Hugging Face names are the names
    in files, or in transformers' module if ``in_files`` is False. ``prefix``,
    ``hf_prefix`` and ``zero_centered_gamma`` are as in :func:`..gdn.hf.gdn_layer_maps`.
    """
    D = dims.hidden_size
    H = dims.num_value_heads
    K = dims.key_head_dim
    V = dims.value_head_dim
    layout = dims.in_proj_layout
    if in_files:
        forget_gate = hf_prefix  # start of the keys of the forget gate's tensors
    else:
        forget_gate = f"{hf_prefix}forget_gate."
    if in_files and family == "bailing_hybrid":
        out = "dense"
    else:
        out = "o_proj"
    name_of = {
        "query": f"{hf_prefix}q_proj",
        "key": f"{hf_prefix}k_proj",
        "value": f"{hf_prefix}v_proj",
        "g": f"{forget_gate}f_proj",
        "gate": f"{hf_prefix}g_proj",
    }
    projections = {
        f"{name_of[section]}.weight": (width, D)
        for section, width in zip(layout.names, layout.widths, strict=True)
    }
    if family == "kimi_linear":
        A_log_shape = (1, 1, H, 1)
    else:
        A_log_shape = (H,)
    shift = -float(zero_centered_gamma)
    maps = [
        tensor_map(
            f"{prefix}in_proj.weight", projections, shard_dim=0, sections=layout.widths
        ),
        tensor_map(f"{prefix}beta_proj.weight", {f"{hf_prefix}b_proj.weight": (H, D)}),
        conv_map(
            f"{prefix}conv1d.weight",
            hf_prefix,
            dims.layout,
            dims.conv_kernel_dim,
            in_files,
        ),
        tensor_map(
            f"{prefix}A_log",
            {f"{forget_gate}A_log": A_log_shape},
            shard_dim=0,
            fp32=True,
        ),
        tensor_map(
            f"{prefix}dt_bias",
            {f"{forget_gate}dt_bias": (H * K,)},
            shard_dim=0,
            fp32=True,
        ),
        tensor_map(
            f"{prefix}out_norm.weight", {f"{hf_prefix}o_norm.weight": (V,)}, shift=shift
        ),
        tensor_map(
            f"{prefix}out_proj.weight",
            {f"{hf_prefix}{out}.weight": (D, H * V)},
            shard_dim=1,
        ),
    ]
    if dims.gates_in_in_proj:
        return maps
    for gate_prefix, letter, rank, width in (
        (forget_gate, "f", dims.forget_rank, H * K),
        (hf_prefix, "g", dims.output_rank, H * V),
    ):
        shapes = {f"{letter}_proj": (width, D)}
        if rank:
            shapes = {f"{letter}_a_proj": (rank, D), f"{letter}_b_proj": (width, rank)}
        for name, shape in shapes.items():
            source = {f"{gate_prefix}{name}.weight": shape}
            # every tensor-parallel rank has the narrow half whole
            shard_dim = None if name.endswith("_a_proj") else 0
            maps.append(tensor_map(f"{prefix}{name}.weight", source, shard_dim))
    return maps
