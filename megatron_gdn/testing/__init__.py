"""What a model promises, measured.

check_generation(model, tokens)               it generates with the probabilities it trains with
python -m megatron_gdn.testing.certificate    what context parallelism changes, see there
"""

from .generation import GenerationGap, check_generation

__all__ = ["GenerationGap", "check_generation"]
