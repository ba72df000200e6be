"""The rules of a Gated DeltaNet, and the choice among them.

The argument ``call`` of a rule's method is a forward or a backward, with its inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.delta_rule.base import HeadSizes, RuleGrads, RuleInputs
from ..ops.delta_rule.fla import DELTA_RULE_FUNCTIONS, FlaDeltaRule
from ..ops.delta_rule.plain import PlainRule
from ..ops.obstacles import Obstacle
from ..ops.rules.base import Bits, RepeatResult, Rule
from ..ops.rules.choice import Choice, choose
from ..ops.rules.fla import (
    BOUNDARY_ARGUMENTS,
    ChunkProducts,
    FlaBackward,
    FlaForward,
    tested_on_h200,
)
from .flash_qla.rule import FlashQlaRule
from .half import HalfOperands

__all__ = ["RULES", "Choice", "Rule", "RuleGrads", "RuleInputs", "resolve_rule"]

_FLA_MODULE = "fla.ops.gated_delta_rule.chunk"


class FlaGDN(FlaDeltaRule):
    """fla's kernels of the gated delta rule, for bf16 or fp16: ``backend="fla"``."""

    repeatable_setups = (tested_on_h200((128, 128)),)
    backward_reads = frozenset({"q", "k", "v", "beta"})
    fla_functions = {
        **DELTA_RULE_FUNCTIONS,
        f"{_FLA_MODULE} chunk_gated_delta_rule_fwd_intra": f"k v g beta {BOUNDARY_ARGUMENTS}",
        f"{_FLA_MODULE} chunk_fwd_o": f"q k v h g scale {BOUNDARY_ARGUMENTS}",
        f"{_FLA_MODULE} recompute_w_u_fwd": f"k v beta A g {BOUNDARY_ARGUMENTS}",
        f"{_FLA_MODULE} chunk_bwd_dv_local": f"q k g do scale {BOUNDARY_ARGUMENTS}",
        f"{_FLA_MODULE} chunk_gated_delta_rule_bwd": (
            f"q k v g beta A scale initial_state do dht {BOUNDARY_ARGUMENTS}"
        ),
    }

    @classmethod
    def why_not(
        cls, device: torch.device, dtype: torch.dtype, sizes: HeadSizes
    ) -> Obstacle | None:
        """Call :meth:`FlaRule.why_not` with the shape of the states."""
        return super().why_not(device, dtype, sizes.state_shape)

    @classmethod
    def repeats(
        cls, device: torch.device, dtype: torch.dtype, sizes: HeadSizes
    ) -> RepeatResult:
        """Call :meth:`FlaRule.repeats` with the shape of the states."""
        return super().repeats(device, dtype, sizes.state_shape)

    def chunk_products(self, call: FlaForward) -> ChunkProducts:
        """The products inside each chunk, which need no state: w ``[B, S, H, K]`` and u
        ``[B, S, H, V]`` of :mod:`..ops.delta_rule.fla`. The backward gets the sums of g
        and the inverse A."""
        _, k, v, _, beta = call.inputs
        g_sum = self.decay_sums(call)
        w, u, A = self.fla.chunk_gated_delta_rule_fwd_intra(
            k=k, v=v, g=g_sum, beta=beta, **call.boundaries
        )
        return ChunkProducts({"k": k, "w": w, "u": u, "g": g_sum}, (g_sum, A))

    def output(
        self, call: FlaForward, products: ChunkProducts, states: Tensor, written: Tensor
    ) -> Tensor:
        """The output ``[B, S, H, V]``, from the ``states`` before chunks, the values
        ``written`` to the state, and the sums of g in ``products``."""
        q = call.inputs.q
        k = call.inputs.k
        return self.fla.chunk_fwd_o(
            q=q,
            k=k,
            v=written,
            h=states,
            g=products.states_arguments["g"],
            scale=k.shape[-1] ** -0.5,
            **call.boundaries,
        )

    def d_states_arguments(self, call: FlaBackward) -> dict[str, Tensor]:
        """The arguments q, k, w, g (its sums) and dv of fla's
        ``chunk_gated_delta_rule_bwd_dhu``, for the gradients of the states.

        :meth:`FlaDeltaRule.d_states` calls fla's function, and adds do, h0, dht, scale
        and the boundaries. dv ``[B, S, H, V]`` is a part of the gradient of the values
        written to the state: the part that d_o of the same chunk gives.
        """
        q, k, v, _, beta = call.inputs
        g_sum, A = call.kept_tensors
        w, _ = self.fla.recompute_w_u_fwd(
            k=k, v=v, beta=beta, A=A, g=g_sum, **call.boundaries
        )
        dv = self.fla.chunk_bwd_dv_local(
            q=q, k=k, g=g_sum, do=call.d_o, scale=k.shape[-1] ** -0.5, **call.boundaries
        )
        return {"q": q, "k": k, "w": w, "g": g_sum, "dv": dv}

    def gradients(
        self, call: FlaBackward, initial: Tensor | None, d_final: Tensor | None
    ) -> RuleGrads:
        """The gradients of the inputs; ``initial`` and ``d_final`` are ``[N, H, K, V]``
        or None (zeros).

        fla returns dbeta before dg. After dg it returns the gradient of ``initial``,
        which is not read: :meth:`d_states` gives it to the callers that need it.
        """
        q, k, v, _, beta = call.inputs
        g_sum, A = call.kept_tensors
        grads = self.fla.chunk_gated_delta_rule_bwd(
            q=q,
            k=k,
            v=v,
            g=g_sum,
            beta=beta,
            A=A,
            scale=k.shape[-1] ** -0.5,
            initial_state=initial,
            do=call.d_o,
            dht=d_final,
            **call.boundaries,
        )
        dq, dk, dv, dbeta, dg = grads[:5]
        return RuleGrads(dq, dk, dv, dg, dbeta)


RULES = (FlashQlaRule, FlaGDN, PlainRule)  # in the order of preference


def require_operands(operands: str) -> None:
    """Raise a ValueError for other ``operands`` than "fp16" and "bf16", the dtypes to
    which a layer may round the operands of the rule's products."""
    if operands not in ("fp16", "bf16"):
        raise ValueError(
            f"unknown rule_operands {operands!r} of the delta rule; use 'fp16' or "
            "'bf16'."
        )


def resolve_rule(
    backend: str = "auto",
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    sizes: HeadSizes,
    bits: Bits = Bits.FREE,
    operands: str = "fp16",
    normalise_qk: bool = True,
) -> Choice:
    """Choose the delta rule of a layer by head sizes, dtype, device and installed
    packages.

    Args:
        backend: ``"flash_qla"``, ``"fla"``, ``"reference"`` (plain torch), or
            ``"auto"``, the first backend of this list that runs here. If "auto" skips
            flash_qla, the log says why, once. A backend that the caller names is never
            replaced by another backend.
        bits: with ``Bits.DETERMINISTIC`` results repeat bit for bit, from run to run
            and process to process, and a sequence's results do not depend on other
            sequences. ``"auto"`` takes the first of flash_qla and fla whose bits a test
            found to repeat for this GPU, dtype, heads and versions
            (:class:`.repeatable.RepeatableSetup`). If there is none, it takes the
            reference. With these bits fla does not choose configurations of its kernels
            by timing them: each kernel has one. A backend that the caller names runs
            even if untested; the log then says so. With
            ``Bits.ON_GRID`` a token's bits depend only on its sequence's tokens; then
            only ``"auto"`` and ``"reference"`` are legal.
        operands: the dtype to which flash_qla and fla round operands of products in a
            bf16 layer: ``"fp16"``, or ``"bf16"``, which has three bits less but a wider
            range (see :mod:`.half`). If fp16 would be more exact but cannot be used,
            the choice's ``reason`` says why.
        normalise_qk: whether q and k have unit length, which fp16 operands need.

    Raises:
        ValueError: an unknown backend, or a backend that does not support these sizes,
            this dtype, this device or ``bits``.
        ImportError: the backend's package is missing, too old, or faulty on this
            machine.
    """
    require_operands(operands)
    device = torch.device(device)
    choice = choose(
        backend,
        "Gated DeltaNet",
        RULES,
        device=device,
        dtype=dtype,
        sizes=sizes,
        bits=bits,
    )
    rule, reason = choice
    if operands == "bf16" or rule.name == "reference" or dtype != torch.bfloat16:
        # the caller chose bf16, or the operands are at least as exact as fp16
        return choice
    if rule.batch_invariant:
        why = (
            "deterministic mode bars rounding that depends on all documents of a batch"
        )
    elif not normalise_qk:
        why = "without unit length, q and k may leave the range of fp16"
    else:
        return Choice(HalfOperands(rule), f"{reason}; fp16 operands")
    return Choice(rule, f"{reason}; no fp16 operands: {why}")
