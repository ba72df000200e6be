"""For transformers models: packing that does not leak, and context parallelism, in place.

| file                      | what it does                                                         |
|---------------------------|----------------------------------------------------------------------|
| ``patching.py``           | replaces the modules of a model and undoes it                        |
| ``layer.py``              | the module that takes their place                                    |
| ``families.py``           | transformers' modules by name, and the mixer that each becomes       |
| ``model_forward.py``      | around a text model's forward: batch, positions, masks, attention    |
| ``sources.py``            | masks, ids, offsets, positions: all to document ids                  |
| ``batch.py``, ``place.py``| how rows lie on one rank, and over context-parallel ranks            |
| ``gates.py``              | ``A_log`` and ``dt_bias`` in fp32, in memory and from files          |
| ``collator.py``           | packed batches, a rank's share of one, ``Trainer`` over ranks        |
| ``leaks.py``              | does a document reach another?                                       |

transformers is imported where a function needs it, and not before.
"""

from .batch import ModelBatch
from .collator import ContextParallelTrainerMixin, PackingCollator, context_parallel_share
from .families import plain_functions_on_cpu
from .gates import SSMGate, gates_in_fp32, install_ssm_gate, shard_gates
from .layer import CPAwareGatedDeltaNet
from .leaks import Leak, PackingLeak, assert_no_packing_leak, packing_leaks, packing_reach
from .patching import Patch, patch
from .sources import is_indexed_packed_mask

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
