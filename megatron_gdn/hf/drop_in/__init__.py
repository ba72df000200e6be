"""For transformers models: packing that does not leak, and context parallelism, in place.

transformers is imported where a function needs it; Megatron is never imported.
"""

from .. import __getattr__ as __getattr__  # the names, which `megatron_gdn.hf` lists
