"""What stands in this package for some versions of Megatron-Core alone, and until when.

A `Gate` names a fault or a lack of Megatron and the first version without it. Code
behind a gate runs on older versions. Once `tested.TESTED` names no older version, a
test asks to remove it. Read in Megatron-LM's main at d98e8a64dd (2026-08-22, version
0.20.0) and dev at d48bd6be0a (2026-08-21, version 0.19.0).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ops.obstacles import version_tuple


@dataclass(frozen=True)
class Gate:
    """A fault of Megatron-Core, or a feature that it does not have, for which this
    package has code of its own.

    Args:
        fault: what Megatron does, or does not do.
        until: the first version of megatron-core without the fault, as ``"0.20"``;
            None: main has it too.
    """

    fault: str
    until: str | None = None

    def is_open(self) -> bool:
        """Whether the Megatron-Core that runs has the fault."""
        from megatron.core import __version__

        if self.until is None:
            return True
        return version_tuple(__version__)[:2] < version_tuple(self.until)


MUON_KNOWS_ATTENTION_ALONE = Gate(
    "Muon cuts every fused projection in the sizes of attention's heads", until="0.19"
)
# Optimizers of models that have parameters of two dtypes.
PADDING_BEFORE_STATES = Gate(
    "fully_reshardable files of several buckets hold the states of wrong parameters",
    until="0.20",
)
STATES_IN_BUFFER_ORDER = Gate(
    "DistributedOptimizer numbers parameters in the order of its buffers, not in Adam's "
    "(NVIDIA/Megatron-LM issue 2777; repaired on dev by pull request 5835)"
)
STATES_OF_HALF_PARAMETERS = Gate(
    "Float16Optimizer's files list 16-bit parameters alone. 0.20 numbers them right "
    "(pull request 5929), but still stores no fp32 parameter with the optimizer, and "
    "files of this package hold them"
)
REPLICAS_DIFFER = Gate(
    "DistributedOptimizer loads its own shard of an fp32 parameter, so replicas differ"
)
EMPTY_SHARES = Gate(
    "dp_reshardable files refuse a share without parameters (pull request 6191 covers "
    "shares of padding)"
)
NO_MAIN_GRADS = Gate("under torch's FSDP2 fp32 parameters have no main_grad")
ONE_DTYPE_IN_MUON = Gate("LayerWiseDistributedOptimizer gathers dtypes as one tensor")
NO_STATES_TO_LOAD = Gate("ChainedOptimizer.state_dict makes no states for a load")
TWO_DIVISIONS_IN_ONE_SUM = Gate(
    "Megatron-FSDP joins sums that divide by the ranks with sums that do not, and torch "
    "takes the first for all"
)
# Files.
SIZES_WITHOUT_NAMES = Gate(
    "errors and files of gradient buffers name no parameter, and no way to another layer"
)
STRIDES = Gate("files of torch 2.15 store strides, which torch.empty refuses")
IN_PROJ_BY_RANK = Gate("in_proj's bias and adapters are stored rank by rank")
# Not Megatron's: it goes when files of 0.1 need not load any more.
OLD_NAMES = Gate("files of this package's version 0.1 have other keys for 'K' layers")
