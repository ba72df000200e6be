"""Run transformers models in place, with packing that does not leak and context parallelism.

transformers is imported where a function needs it; Megatron is never imported.
"""

from .. import __getattr__ as __getattr__  # `megatron_gdn.hf` lists the names
