"""Run transformers models in place, with context parallelism and with documents kept apart.

transformers is imported where a function needs it; Megatron is never imported.
"""

from .. import __getattr__ as __getattr__  # `megatron_gdn.hf` lists the names
