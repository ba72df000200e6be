"""Plain-torch pieces of a layer, whose checkpoints load into Transformer Engine models and back."""

from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, cast

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_gdn.compat.torch_norm import TorchRMSNorm
from megatron_gdn.mixers.attention import TorchAttention, TorchSelfAttention
from megatron_gdn.mixers.loader_layout import AUTO

# Megatron builds it as it is, though its annotations ask for a class.
BIAS_DROPOUT_ADD = cast(type, get_bias_dropout_add)


def norm_before(linear: str, place: str = "input_layernorm") -> dict[str, Any]:
    """Submodules of a layer: its norm at ``place``, stored as Transformer Engine stores it, which
    fuses it into ``linear``."""
    return {
        place: TorchRMSNorm,
        "sharded_state_dict_keys_map": {f"{place}.": f"{linear}.layer_norm_"},
    }


def local_mlp_builder():
    """Dense MLP over Megatron's own linears."""
    return partial(
        MLP.as_mlp_submodule,
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
    )


def local_attention_spec(qk_layernorm: bool = False, cp_layout: str = AUTO) -> ModuleSpec:
    """Causal self-attention in plain torch: batches, packed documents, context parallelism."""
    qk_norm = {"q_layernorm": TorchRMSNorm, "k_layernorm": TorchRMSNorm} if qk_layernorm else {}
    return ModuleSpec(
        module=TorchSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal, "cp_layout": cp_layout},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=partial(TorchAttention, cp_layout=cp_layout),
            linear_proj=RowParallelLinear,
            **qk_norm,
        ),
        metainfo={"fuse_input_layernorm": False},
    )


class LocalMoELayer(MoETransformerLayer):
    """Experts in plain torch. A spec that ``--spec`` names sees no config, so the layer chooses its
    own ``mlp``: as many experts as ``config.num_moe_experts``, which must not be None."""

    def __init__(
        self, config: TransformerConfig, submodules: TransformerLayerSubmodules, **others: Any
    ) -> None:
        if config.num_moe_experts is None:
            UnavailableLayer(symbol="E")
        mlp = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
        super().__init__(config, replace(submodules, mlp=mlp), **others)


class UnavailableLayer:
    """In the place of a layer that a spec lacks: building it is an error."""

    def __init__(self, *args: Any, symbol: str, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"the local hybrid spec has no layer for {symbol!r}: it offers 'G' (Gated DeltaNet), "
            "'K' (Kimi Delta Attention), 'M' (Mamba2), '-' (MLP), '*' (attention) and, if "
            "num_moe_experts (--num-experts) is given, 'E' (experts). Use "
            'hybrid_stack_spec("te"), which needs Transformer Engine, or change '
            "--hybrid-layer-pattern."
        )
