"""A stack for ``--spec`` with Megatron's own Gated DeltaNet where ours would be.

The rest of the stack is the same, so that only the layer differs.
"""

import os

os.environ["GDN_TEST_LAYER"] = "upstream"

from megatron_gdn import specs  # noqa: E402
from tests.upstream import layer_spec  # noqa: E402

hybrid_stack_spec = specs.hybrid_stack_spec("local")
hybrid_stack_spec.submodules.gdn_layer.submodules.self_attention = layer_spec()
