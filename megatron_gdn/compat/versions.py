"""The faults of Megatron-Core that this package repairs, and the versions that have
them.

Code that repairs an `UpstreamFault` runs only if Megatron has the fault. A test fails if
no version in `tested.TESTED_VERSIONS` has the fault; then remove that code. Which
version has which fault was read in Megatron-LM's main at d98e8a64dd (2026-08-22,
version 0.20.0) and dev at d48bd6be0a (2026-08-21, version 0.19.0).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ops.obstacles import version_tuple


@dataclass(frozen=True)
class UpstreamFault:
    """A fault of Megatron-Core, or a feature that it lacks, for which this package has
    code of its own.

    Args:
        description: what Megatron does, or does not do.
        until: the first version of megatron-core without the fault, as ``"0.20"``;
            None: Megatron's main branch has the fault too.
    """

    description: str
    until: str | None = None

    def is_present(self) -> bool:
        """Whether the imported Megatron-Core has the fault."""
        from megatron.core import __version__

        if self.until is None:
            return True
        return version_tuple(__version__)[:2] < version_tuple(self.until)


MUON_SPLITS_AS_ATTENTION = UpstreamFault(
    "Muon cuts every fused projection in the sizes of attention's heads", until="0.19"
)
# Optimizers of models that have parameters of two dtypes.
PADDING_BEFORE_STATES = UpstreamFault(
    "fully_reshardable files of several buckets hold the states of wrong parameters",
    until="0.20",
)
STATES_IN_BUFFER_ORDER = UpstreamFault(
    "DistributedOptimizer numbers parameters in the order of its buffers, not in Adam's "
    "(NVIDIA/Megatron-LM issue 2777; repaired on dev by pull request 5835)"
)
FP32_PARAMETERS_NOT_STORED = UpstreamFault(
    "Float16Optimizer's files list 16-bit parameters alone. 0.20 numbers them right "
    "(pull request 5929), but still stores no fp32 parameter with the optimizer, and "
    "files of this package hold them"
)
REPLICAS_DIFFER = UpstreamFault(
    "DistributedOptimizer loads its own shard of an fp32 parameter, so replicas differ"
)
EMPTY_SHARES_REFUSED = UpstreamFault(
    "dp_reshardable files refuse a share without parameters (pull request 6191 covers "
    "shares of padding)"
)
NO_MAIN_GRADS = UpstreamFault("under torch's FSDP2 fp32 parameters have no main_grad")
MUON_GATHERS_ONE_DTYPE = UpstreamFault(
    "LayerWiseDistributedOptimizer gathers dtypes as one tensor"
)
NO_STATES_TO_LOAD = UpstreamFault(
    "ChainedOptimizer.state_dict makes no states for a load"
)
FSDP_JOINS_MEANS_AND_SUMS = UpstreamFault(
    "Megatron-FSDP joins reductions that divide by the ranks with reductions that do "
    "not, and torch treats all of them as the first one"
)
# Files.
SIZE_ERRORS_WITHOUT_NAMES = UpstreamFault(
    "errors and files of gradient buffers name no parameter, and no way to another layer"
)
STRIDES_IN_FILES = UpstreamFault(
    "files of torch 2.15 store strides, which torch.empty refuses"
)
IN_PROJ_STORED_BY_RANK = UpstreamFault(
    "in_proj's bias and adapters are stored rank by rank"
)
# Not a fault of Megatron. The entry goes when files of 0.1 need not load any more.
KDA_NAMES_OF_0_1 = UpstreamFault(
    "files of this package's version 0.1 have other keys for 'K' layers"
)
