"""For transformers models: packing that does not leak, and context parallelism, in place."""

from .layer import CPAwareGatedDeltaNet
from .patching import Patch, patch

__all__ = ["CPAwareGatedDeltaNet", "Patch", "patch"]
