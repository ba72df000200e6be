"""What a model promises, measured; also ``python -m megatron_gdn.testing.certificate``."""

from .generation import GenerationGap, check_generation

__all__ = ["GenerationGap", "check_generation"]
