"""Layer specs for Megatron launches, such as `--spec megatron_gdn.specs hybrid_stack_spec`."""

from .gpt import gpt_block_spec
from .hybrid import gdn_hybrid_stack_spec, gdn_hybrid_stack_spec_local, hybrid_stack_spec
from .layer import gated_delta_net_spec

__all__ = [
    "gated_delta_net_spec",
    "gdn_hybrid_stack_spec",
    "gdn_hybrid_stack_spec_local",
    "gpt_block_spec",
    "hybrid_stack_spec",
]
