"""One Gated DeltaNet layer over packed documents: ``python examples/quickstart.py``.

A training run with a whole model, data and checkpoints is `pretrain_hybrid.py` beside
this file.
"""

from typing import Any

import torch

from megatron_gdn.compat.observe import hide_import_notes

hide_import_notes()  # of packages that are absent: fifteen lines

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_gdn.compat.one_process import end_one_process, start_one_process
from megatron_gdn.specs import gated_delta_net_spec

# what every Megatron model needs; without a GPU on the CPU
device = start_one_process()

config = TransformerConfig(
    num_layers=1,
    hidden_size=64,
    num_attention_heads=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=32,
    linear_conv_kernel_dim=4,
    normalization="RMSNorm",
    use_cpu_initialization=True,
    gradient_accumulation_fusion=False,
)
layer: Any = build_module(gated_delta_net_spec("local"), config, layer_number=1)
layer.to(device)

# Three documents of 5, 100 and 23 tokens, laid end to end: [tokens, 1, hidden].
offsets = torch.tensor([0, 5, 105, 128], dtype=torch.int32, device=device)
packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
x = torch.randn(128, 1, 64, device=device, requires_grad=True)

y, _ = layer(x, packed_seq_params=packed)
y.square().sum().backward()

print(f"backend {layer.backend}, output {tuple(y.shape)}, gradients:")
for name, parameter in layer.named_parameters():
    print(
        f"  {name:16} {tuple(parameter.shape)!s:14} {parameter.grad.norm().item():.3e}"
    )

end_one_process()
