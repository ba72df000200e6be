"""The front of a mixer in plain torch, on any device; fp64 rows are computed in fp64.

:mod:`.launches` has the same front in Triton; :func:`front_of` chooses between the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..autograd import gradients
from ..conv import convolve_rows
from ..elementwise import l2norm
from ..obstacles import log_obstacle_once, why_not_triton
from ..rules.base import Bits
from .table import Batch, Front, FrontParameters, FrontTable


@dataclass(frozen=True, eq=False)
class PlainFront(Front):
    """A :class:`Front` in plain torch; autograd computes its backward."""

    @torch.no_grad()
    def _make_inputs(self, batch: Batch, wanted: tuple[str, ...]) -> dict[str, Tensor]:
        made = self._differentiable_inputs(batch, wanted)
        kind = self.dtype or batch.proj.dtype
        return {
            name: (x.to(kind) if name in self.convolved else x).contiguous()
            for name, x in made.items()
        }

    def _differentiable_inputs(
        self, batch: Batch, wanted: tuple[str, ...]
    ) -> dict[str, Tensor]:
        """The ``wanted`` inputs of the rule by name, in fp32 or wider."""
        proj, given, documents, history = batch
        wide = torch.promote_types(proj.dtype, torch.float32)
        made = {}
        rows_BSP = proj.transpose(0, 1)
        bias = given.bias
        for part in self.table.convolved:
            if part.rule_input not in wanted:
                continue
            channels = self.channels[part.section]
            x = convolve_rows(
                rows_BSP[..., self.layout.columns(part.section)].to(wide),
                given.weight.flatten(1)[channels].to(wide),
                None if bias is None else bias[channels].to(wide),
                documents,
                None
                if history is None
                else history._replace(rows=history.rows[..., channels]),
            )
            x = x.unflatten(-1, self.layout.shape_of(part.section))
            made[part.rule_input] = l2norm(x) if part.unit_length else x
        return made | self.gates_of(
            proj, given.A_log, given.dt_bias, given.apart, wanted
        )

    def _compute_gradients(
        self, batch: Batch, grads: object, d_proj: Tensor, d_apart: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        proj, given, documents, history = batch
        wide = torch.promote_types(proj.dtype, torch.float32)

        def run(
            proj: Tensor,
            before: Tensor | None,
            apart: Tensor | None,
            *parameters: Tensor,
        ):
            """The rule's inputs; ``before``: history rows; ``apart``: the gates' own
            rows."""
            weight, bias, A_log, dt_bias = parameters
            of = FrontParameters(weight, bias, A_log, dt_bias, None, apart)
            inner = Batch(
                proj, of, documents, history and history._replace(rows=before)
            )
            return list(self._differentiable_inputs(inner, self.names).values())

        d_made = []
        sections = self.table.convolved + self.table.gates
        factor = getattr(grads, "factor", None)
        for part in sections:
            heads = self.layout.shape_of(part.section)[0]
            for name in (
                (part.rule_input,)
                if isinstance(part.rule_input, str)
                else part.rule_input
            ):
                d = getattr(grads, name).to(wide).unflatten(2, (heads, -1))
                # sum over the value heads that share one head of this input
                d = d.sum(3)
                if factor is not None:
                    d = d * factor.view(heads, -1)[:, 0].view(
                        (heads,) + (1,) * (d.dim() - 3)
                    )
                d_made.append(d)
        if history is None:
            before = None
        else:
            before = history.rows
        inputs = (proj, before, given.apart) + given[:4]
        inputs = [None if x is None else x.to(wide) for x in inputs]
        d_rows, d_before, d_gates, *of_parameters = gradients(run, inputs, d_made)
        for part in sections:
            columns = self.layout.columns(part.section)
            if columns.start < d_proj.shape[-1]:
                d_proj[..., columns] = d_rows[..., columns]
        if d_apart is not None:
            d_apart.copy_(d_gates)
        if history is not None and history.d_rows is not None:
            history.d_rows.copy_(d_before)
        pairs = zip(of_parameters, given, strict=False)
        return tuple(None if x is None else d.to(x.dtype) for d, x in pairs)


@lru_cache(maxsize=64)
def front_of(
    table: FrontTable,
    device: str,
    rows_dtype: torch.dtype,
    taps: int,
    kernels: str = "auto",
    bits: Bits = Bits.FREE,
    operands: torch.dtype | None = None,
) -> Front:
    """The front of ``table`` for rows of ``rows_dtype`` and a rule that promises
    ``bits``.

    Args:
        kernels: ``"auto"`` (Triton on a GPU, for 2 to 8 taps, any dtype but fp64, and
            gates whose functions have Triton twins), ``"triton"`` or ``"torch"``.
        operands: the dtype of the q, k and v that the rule gets; None: ``rows_dtype``.
    """
    if kernels not in ("auto", "triton", "torch"):
        raise ValueError(
            f"unknown kernels {kernels!r}; use 'auto', 'triton' or 'torch'."
        )
    deterministic = bits >= Bits.DETERMINISTIC
    if kernels == "torch":
        return PlainFront(table, operands, deterministic)
    if kernels == "auto":
        why = why_not_triton(device, rows_dtype, taps)
    else:
        why = None
    if why is None:
        from .launches import TritonFront, gates_without_kernels

        lacking = gates_without_kernels(table)
        if not lacking:
            return TritonFront(table, operands, deterministic)
        why = (
            f"the gates {', '.join(lacking)} have no functions in "
            "ops/front/gate_kernels.py"
        )
        if kernels == "triton":
            raise ValueError(
                f"kernels='triton': {why}. Write them, or use 'auto' or 'torch'."
            )
    log_obstacle_once(f"conv, gates and norm run in plain torch: {why}.", device)
    return PlainFront(table, operands, deterministic)
