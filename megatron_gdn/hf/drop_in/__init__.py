"""For transformers models: packing that does not leak, and context parallelism, in place.

| file                      | what it does                                                      |
|---------------------------|-------------------------------------------------------------------|
| ``patching.py``           | replaces the modules of a model and undoes it                     |
| ``layer.py``              | the module that takes their place                                 |
| ``model_forward.py``      | resolves a forward's batch once, for layers and attention         |
| ``sources.py``            | masks, ids, offsets, positions: all to document ids               |
| ``block_masks.py``        | 4-D masks to document ids, and as attention reads them            |
| ``batch.py``, ``place.py``| how rows lie on one rank, and over context-parallel ranks         |
| ``exchange.py``           | any order of tokens over ranks to contiguous shares               |
| ``attention.py``          | softmax attention over context-parallel ranks                     |
| ``gates.py``, ``loading`` | ``A_log`` and ``dt_bias`` in fp32, in memory and from files       |
| ``collator.py``           | packed batches, and a rank's share of one                         |
| ``trainer.py``            | transformers' ``Trainer`` over context-parallel ranks             |
| ``plain_functions.py``    | transformers' own forward on a CPU, where fla is installed        |
| ``leaks.py``              | does a document reach another?                                    |

transformers is imported where a function needs it, and not before.
"""

from .batch import ModelBatch
from .collator import ContextParallelTrainerMixin, PackingCollator, context_parallel_share
from .gates import SSMGate, gates_in_fp32, install_ssm_gate, shard_gates
from .layer import CPAwareGatedDeltaNet
from .leaks import Leak, PackingLeak, assert_no_packing_leak, packing_leaks, packing_reach
from .patching import Patch, patch
from .plain_functions import plain_functions_on_cpu
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
