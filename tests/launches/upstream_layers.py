"""``--spec tests.launches.upstream_layers hybrid_stack``: Megatron's own Gated DeltaNet."""

from tests.precision.training import stack_of

hybrid_stack = stack_of(upstream_layer=True)
