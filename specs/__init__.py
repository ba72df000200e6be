"""Layer specs for Megatron launches, such as
`--spec megatron_gdn.specs hybrid_stack_spec`."""

from megatron.core import __version__ as _megatron_version

from megatron_gdn.compat.tested import warn_of_untested

# Called first, since the next imports may fail.
warn_of_untested("megatron-core", _megatron_version)

from .gpt import gpt_block_spec  # noqa: E402
from .hybrid import (  # noqa: E402
    gdn_hybrid_stack_spec,
    gdn_hybrid_stack_spec_local,
    gdn_qk_norm_hybrid_stack_spec,
    gdp_stack_spec,
    hybrid_stack_spec,
    kimi_linear_stack_spec,
)
from .layer import (  # noqa: E402
    gated_delta_net2_spec,
    gated_delta_net_spec,
    gated_delta_product_spec,
    kimi_delta_attention_spec,
    mamba2_spec,
)

__all__ = [
    "gated_delta_net2_spec",
    "gated_delta_net_spec",
    "gated_delta_product_spec",
    "gdn_hybrid_stack_spec",
    "gdn_hybrid_stack_spec_local",
    "gdn_qk_norm_hybrid_stack_spec",
    "gdp_stack_spec",
    "gpt_block_spec",
    "hybrid_stack_spec",
    "kimi_delta_attention_spec",
    "kimi_linear_stack_spec",
    "mamba2_spec",
]
