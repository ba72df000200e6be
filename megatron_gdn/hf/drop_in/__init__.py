"""For transformers models: packing that does not leak, and context parallelism, in place.

`patching` replaces a model's linear-attention modules by those of `layer` and wraps its forward;
`families` says how transformers' modules are read, `gates` keeps ``A_log`` and ``dt_bias`` in fp32.
`sources` turns masks, ids, offsets and positions to document ids, `batch` these to rows of one rank
or of several. `training` has the collator, ``Trainer`` over ranks, and the test for leaks.

transformers is imported where a function needs it, and not before; Megatron never.
"""

from .. import __getattr__ as __getattr__  # the names, which `megatron_gdn.hf` lists
