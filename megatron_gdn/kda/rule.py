"""The rules of Kimi Delta Attention: the gated delta rule with a decay per channel."""

from __future__ import annotations

import torch

from ..ops.delta_rule.base import RuleInputs
from ..ops.delta_rule.fla import CHANNEL_RULE_FUNCTIONS, FlaChannelRule
from ..ops.delta_rule.plain import PlainRule
from ..ops.obstacles import Obstacle
from ..ops.rules.base import Bits, RepeatResult
from ..ops.rules.choice import Choice, choose
from ..ops.rules.fla import BOUNDARY_ARGUMENTS, tested_on_h200
from ..ops.state_maps.state_map import StateShape
from .cudnn import CudnnKDA
from .sizes import KDARuleSizes

# fla's faster kernels compute exp of minus the sum of up to 16 log-decays. With
# log-decays of -5 or more this is at most e^80, which fp32 holds.
_SAFE_LOWER_BOUND = -5.0


class FlaKDA(FlaChannelRule):
    """KDA by fla's kernels, by the faster ones if g has a ``lower_bound`` of -5 or
    more."""

    backward_reads = frozenset(RuleInputs._fields)
    repeatable_setups = (tested_on_h200((128, 128)),)
    fla_functions = {
        **CHANNEL_RULE_FUNCTIONS,
        "fla.ops.kda.chunk_fwd chunk_kda_fwd_intra": (
            f"q k v gk beta scale safe_gate {BOUNDARY_ARGUMENTS}"
        ),
        "fla.ops.kda.chunk_bwd recompute_w_u_fwd": (
            f"q k v beta A gk {BOUNDARY_ARGUMENTS}"
        ),
        "fla.ops.kda.chunk_bwd chunk_kda_bwd": (
            "q k v beta Aqk Akk scale initial_state do dht g safe_gate "
            f"{BOUNDARY_ARGUMENTS}"
        ),
    }

    # what each names: see `FlaChannelRule`
    chunk_function = "chunk_kda_fwd_intra"
    recompute_function = "recompute_w_u_fwd"
    backward_function = "chunk_kda_bwd"
    gate_arguments = ("beta",)

    def __init__(
        self, lower_bound: float | None = None, bits: Bits = Bits.FREE
    ) -> None:
        """``lower_bound`` is the least log-decay; None: there is no bound. fla's
        argument ``safe_gate`` selects its faster kernels."""
        super().__init__(bits)
        safe = lower_bound is not None and lower_bound >= _SAFE_LOWER_BOUND
        self.chunk_and_backward_arguments = {"safe_gate": safe}

    @classmethod
    def why_not(
        cls, device: torch.device, dtype: torch.dtype, sizes: KDARuleSizes
    ) -> Obstacle | None:
        """Call :meth:`FlaRule.why_not` with the shape of the states."""
        return super().why_not(device, dtype, sizes.state_shape)

    @classmethod
    def repeats(
        cls, device: torch.device, dtype: torch.dtype, sizes: KDARuleSizes
    ) -> RepeatResult:
        """Call :meth:`FlaRule.repeats` with the shape of the states."""
        return super().repeats(device, dtype, sizes.state_shape)

    @classmethod
    def of(cls, sizes: KDARuleSizes, bits: Bits) -> FlaKDA:
        return cls(sizes.lower_bound, bits)


RULES = FlaKDA, CudnnKDA, PlainRule  # in the order of preference


def choose_kda(
    backend: str,
    state: StateShape,
    lower_bound: float | None,
    device: torch.device,
    dtype: torch.dtype,
    bits: Bits = Bits.FREE,
) -> Choice:
    """Choose the rule of a Kimi Delta Attention by dtype, device and installed
    packages.

    ``backend`` is ``"fla"``, ``"cudnn"`` (cudnn-frontend's kernels for Hopper),
    ``"reference"`` (plain torch) or ``"auto"``: fla if it runs here, else the
    reference. If the log-decay has a ``lower_bound`` of -5 or more, fla runs faster
    kernels; cuDNN needs such a bound.

    ``bits`` is what the rule must promise (:class:`..ops.rules.base.Bits`).

    Raises:
        ValueError: an unknown backend, or a backend that does not support these heads,
            this dtype, this device or ``bits``.
        ImportError: the backend's package is missing, too old, or computes wrong
            results here.
    """
    return choose(
        backend,
        "Kimi Delta Attention",
        RULES,
        device=device,
        dtype=dtype,
        sizes=KDARuleSizes(state, lower_bound),
        bits=bits,
    )
