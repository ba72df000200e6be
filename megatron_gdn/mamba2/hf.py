"""The weights of a Mamba2 mixer in Hugging Face's files (Mamba2, NemotronH) and in
Megatron.

Both formats store the projection as rows z | x | B | C | dt and the convolution as x |
B | C. All tensors but the convolution's have the same names in both. Tensors keep their
bits, but ``A_log``, ``dt_bias`` and ``D`` become fp32. Each section is split over
tensor-parallel ranks by itself.
"""

from __future__ import annotations

from ..mixers.tensor_map import TensorMap, conv_map, tensor_map
from .sizes import Mamba2Dims


def mamba2_layer_maps(
    prefix: str, hf_prefix: str, dims: Mamba2Dims, conv_bias: bool = True
) -> list[TensorMap]:
    """The maps of every parameter of one mixer.

    ``prefix`` starts Megatron's keys, for example ``decoder.layers.0.mixer.``;
    ``hf_prefix`` starts Hugging Face's keys, for example ``backbone.layers.0.mixer.``.
    ``conv_bias``: whether the convolution has a bias.
    """
    layout = dims.layout
    D = dims.hidden_size
    in_proj = {f"{hf_prefix}in_proj.weight": (layout.width, D)}
    maps = [
        tensor_map(
            f"{prefix}in_proj.weight", in_proj, shard_dim=0, sections=layout.widths
        ),
        conv_map(
            f"{prefix}conv1d_weight",
            hf_prefix,
            layout,
            dims.conv_kernel_dim,
            in_three=False,
        ),
        tensor_map(
            f"{prefix}norm.weight",
            {f"{hf_prefix}norm.weight": (dims.d_inner,)},
            shard_dim=0,
        ),
        tensor_map(
            f"{prefix}out_proj.weight",
            {f"{hf_prefix}out_proj.weight": (D, dims.d_inner)},
            shard_dim=1,
        ),
    ]
    for name in ("A_log", "dt_bias", "D"):
        source = {f"{hf_prefix}{name}": (dims.num_heads,)}
        maps.append(tensor_map(f"{prefix}{name}", source, shard_dim=0, fp32=True))
    if conv_bias:
        bias = {f"{hf_prefix}conv1d.bias": (layout.conv_width,)}
        maps.append(
            tensor_map(
                f"{prefix}conv1d_bias", bias, shard_dim=0, sections=layout.conv_widths
            )
        )
    return maps
