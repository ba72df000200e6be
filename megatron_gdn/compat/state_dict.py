"""The type of state dicts, of torch and of Megatron."""

from typing import Any

# Key -> tensor, shard of a tensor, object, or a dict or list of these. torch and
# Megatron declare no narrower type.
StateDict = dict[str, Any]
