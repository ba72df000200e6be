"""What a layer's backward computes again, from its options and from Megatron's config.

==========  ====================================================================================
recompute   computed again in the backward, not kept
==========  ====================================================================================
``none``    q, which costs least per byte
``light``   also k and v (``qkv``) and out_proj's input (``norm_out``)
``full``    also the rule's output and gates, and the inverses of its chunks (``rule``)
==========  ====================================================================================
"""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig

from .arguments import recomputed_parts

LEVELS = {
    "none": frozenset(),
    "light": frozenset({"qkv", "norm_out"}),
    "full": frozenset({"qkv", "norm_out", "rule"}),
}
_CALLED = {"qkv": "query, key and value", "norm_out": "the normed output"}


def computed_again(
    config: TransformerConfig, recompute: str | None, **options: bool | None
) -> frozenset[str]:
    """Of ``qkv``, ``norm_out`` and ``rule`` those that any setting asks for, or ``whole`` alone.

    ``recompute`` is one of LEVELS, or None. ``options`` are the layer's ``recompute_qkv`` and
    ``recompute_norm_out`` by the names of the parts; None was not given.
    """
    if recompute is not None and recompute not in LEVELS:
        legal = ", ".join(repr(level) for level in LEVELS)
        raise ValueError(f"recompute={recompute!r} is not known; use one of {legal}.")
    asked = set() if recompute is None else set(LEVELS[recompute])
    for part, given in options.items():
        if given not in (None, True, False):
            raise ValueError(f"recompute_{part}={given!r} must be True or False.")
        if recompute is not None and given is not None and given != (part in asked):
            does = "computes" if part in asked else "does not compute"
            raise ValueError(
                f"recompute={recompute!r} and recompute_{part}={given} contradict: {recompute!r} "
                f"{does} {_CALLED[part]} again. Give one of the two."
            )
    asked |= {part for part, given in options.items() if given}
    of_modules = recomputed_parts(config)
    if recompute == "none" and of_modules:
        raise ValueError(
            f"recompute='none' and --recompute-modules {' '.join(config.recompute_modules or ())} "
            f"contradict. Leave the option out, or take the names that begin with 'gdn' out of "
            f"the modules."
        )
    asked |= of_modules
    return frozenset({"whole"} if "whole" in asked else asked)
