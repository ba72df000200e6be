"""The type of state dicts, of torch and of Megatron."""

from typing import Any

# By key: tensors, shards of tensors, objects, or further dicts and lists of these. The
# packages that write state dicts declare no narrower type.
StateDict = dict[str, Any]
