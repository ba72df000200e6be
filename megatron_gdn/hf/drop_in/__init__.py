"""For transformers models: packing that does not leak, and context parallelism, in place.

`patching` replaces a model's linear-attention modules by those of `layer` and wraps its forward;
`families` says how transformers' modules are read, `gates` keeps ``A_log`` and ``dt_bias`` in fp32.
`sources` turns masks, ids, offsets and positions to document ids, `batch` these to rows of one rank
or of several. `training` has the collator, ``Trainer`` over ranks, and the test for leaks.

transformers is imported where a function needs it, and not before; Megatron never.
"""

from .batch import ModelBatch, context_parallel_share
from .families import plain_functions_on_cpu
from .gates import SSMGate, gates_in_fp32, install_ssm_gate, shard_gates
from .layer import CPAwareGatedDeltaNet
from .patching import Patch, patch
from .sources import is_indexed_packed_mask
from .training import (
    ContextParallelTrainerMixin,
    Leak,
    PackingCollator,
    PackingLeak,
    assert_no_packing_leak,
    packing_leaks,
    packing_reach,
)

__all__ = [
    "CPAwareGatedDeltaNet",
    "ContextParallelTrainerMixin",
    "Leak",
    "ModelBatch",
    "PackingCollator",
    "PackingLeak",
    "Patch",
    "SSMGate",
    "assert_no_packing_leak",
    "context_parallel_share",
    "gates_in_fp32",
    "install_ssm_gate",
    "is_indexed_packed_mask",
    "packing_leaks",
    "packing_reach",
    "patch",
    "plain_functions_on_cpu",
    "shard_gates",
]
