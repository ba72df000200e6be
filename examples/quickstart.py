"""One Gated DeltaNet layer over packed documents: ``python examples/quickstart.py``.

A training run with a whole model, data and checkpoints is `pretrain_hybrid.py` beside this file.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_gdn.compat.megatron_on_cpu import run_megatron_on_cpu
from megatron_gdn.specs import gated_delta_net_spec

# What every Megatron model needs: a process group (of one), parallel state, a seed.
run_megatron_on_cpu()  # does nothing on a machine with a GPU
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(1234)
device = "cuda" if torch.cuda.is_available() else "cpu"

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
layer = build_module(gated_delta_net_spec("local"), config, layer_number=1).to(device)

# Three documents of 5, 100 and 23 tokens, laid end to end: [tokens, 1, hidden].
offsets = torch.tensor([0, 5, 105, 128], dtype=torch.int32, device=device)
packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
x = torch.randn(128, 1, 64, device=device, requires_grad=True)

y, _ = layer(x, packed_seq_params=packed)
y.square().sum().backward()

print(f"backend {layer.backend}, output {tuple(y.shape)}, gradients:")
for name, parameter in layer.named_parameters():
    print(f"  {name:16} {tuple(parameter.shape)!s:14} {parameter.grad.norm().item():.3e}")

parallel_state.destroy_model_parallel()
dist.destroy_process_group()
