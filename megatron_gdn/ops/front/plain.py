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
from .table import Front, FrontArguments, FrontParameters, FrontTable


@dataclass(frozen=True, eq=False)
class PlainFront(Front):
    """A :class:`Front` in plain torch; autograd computes its backward.

    The forward keeps no autograd graph. So the backward computes the forward again, as
    the backward in Triton does.
    """

    @torch.no_grad()
    def _make_inputs(
        self, arguments: FrontArguments, wanted: tuple[str, ...]
    ) -> dict[str, Tensor]:
        """The ``wanted`` inputs by name, contiguous ``[B, S, heads(, width)]``.

        Convolved inputs get the dtype of the rule's operands; gates stay in fp32 or
        wider. If one result of a gate is wanted, the gate's other result is returned
        too.
        """
        made = self._differentiable_inputs(arguments, wanted)
        dtype = self.operand_dtype or arguments.proj.dtype
        return {
            name: (x.to(dtype) if name in self.convolved_inputs else x).contiguous()
            for name, x in made.items()
        }

    def _differentiable_inputs(
        self, arguments: FrontArguments, wanted: tuple[str, ...]
    ) -> dict[str, Tensor]:
        """The ``wanted`` inputs ``[B, S, heads(, width)]`` by name, in fp32 or wider;
        differentiable."""
        proj, parameters, documents, history = arguments
        wide = torch.promote_types(proj.dtype, torch.float32)
        made = {}
        rows_BSP = proj.transpose(0, 1)
        for part in self.table.convolved_sections:
            if part.rule_input not in wanted:
                continue
            channels = self.conv_channels[part.section]
            bias = parameters.bias
            if bias is not None:
                bias = bias[channels].to(wide)
            history_of_section = history
            if history is not None:
                history_of_section = history._replace(rows=history.rows[..., channels])
            x = convolve_rows(
                rows_BSP[..., self.layout.columns(part.section)].to(wide),
                parameters.weight.flatten(1)[channels].to(wide),
                bias,
                documents,
                history_of_section,
            )
            x = x.unflatten(-1, self.layout.shape_of(part.section))
            made[part.rule_input] = l2norm(x) if part.has_unit_length else x
        return made | self.gates_of(
            proj, parameters.A_log, parameters.dt_bias, parameters.gate_rows, wanted
        )

    def _compute_gradients(
        self,
        arguments: FrontArguments,
        grads: object,
        d_proj: Tensor,
        d_gate_rows: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Run the forward again and let autograd compute all gradients.

        Returns the gradients of the parameters. Writes the gradients of rows to
        ``d_proj``, ``d_gate_rows`` and ``history.d_rows``. Each gradient in ``grads``
        is ``[B, S, heads of the gradient(, width)]``. If ``grads`` has a ``factor``,
        the true gradient of head h is the given gradient times ``factor[h]``.
        """
        proj, front_parameters, documents, history = arguments
        wide = torch.promote_types(proj.dtype, torch.float32)

        def inputs_from(
            proj: Tensor,
            history_rows: Tensor | None,
            gate_rows: Tensor | None,
            *parameters: Tensor,
        ) -> list[Tensor]:
            """Compute all inputs of the rule from the tensors that get gradients.
            ``parameters``: weight, bias, A_log and dt_bias."""
            weight, bias, A_log, dt_bias = parameters
            named = FrontParameters(weight, bias, A_log, dt_bias, None, gate_rows)
            before = history and history._replace(rows=history_rows)
            differentiated = FrontArguments(proj, named, documents, before)
            made = self._differentiable_inputs(differentiated, self.input_names)
            return list(made.values())

        d_inputs = []
        sections = self.table.convolved_sections + self.table.gate_sections
        factor = getattr(grads, "factor", None)
        for part in sections:
            heads, _ = self.layout.shape_of(part.section)
            for name in part.rule_inputs:
                d_input = getattr(grads, name).to(wide).unflatten(2, (heads, -1))
                # sum over the value heads that share one head of this input
                d_input = d_input.sum(3)
                if factor is not None:
                    # value heads that share a head have equal factors
                    factor_of_head = factor.view(heads, -1)[:, 0]
                    trailing = (1,) * (d_input.dim() - 3)
                    d_input = d_input * factor_of_head.view((heads,) + trailing)
                d_inputs.append(d_input)
        if history is None:
            history_rows = None
        else:
            history_rows = history.rows
        tensors = (proj, history_rows, front_parameters.gate_rows)
        tensors += front_parameters[:4]
        tensors = [None if x is None else x.to(wide) for x in tensors]
        d_rows, d_history_rows, d_gates, *d_parameters = gradients(
            inputs_from, tensors, d_inputs
        )
        for part in sections:
            columns = self.layout.columns(part.section)
            # gate columns past the end of ``d_proj`` are in ``d_gate_rows``
            if columns.start < d_proj.shape[-1]:
                d_proj[..., columns] = d_rows[..., columns]
        if d_gate_rows is not None:
            d_gate_rows.copy_(d_gates)
        if history is not None:
            assert history.d_rows is not None
            history.d_rows.copy_(d_history_rows)
        # weight, bias, A_log, dt_bias; ``front_parameters`` has more fields
        pairs = zip(d_parameters, front_parameters, strict=False)
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
        device: the type of the device, ``"cuda"`` or ``"cpu"``.
        taps: W, the taps of the convolution.
        kernels: ``"auto"`` (Triton on a GPU, for 2 to 8 taps, any dtype but fp64, and
            gates whose functions have Triton twins), ``"triton"`` or ``"torch"``.
        operands: the dtype of the q, k and v that the rule gets; None: ``rows_dtype``.

    Raises:
        ValueError: ``kernels`` is unknown, or it is ``"triton"`` and the Triton kernels
            cannot run this dtype, these taps or the gates of ``table``.
    """
    if kernels not in ("auto", "triton", "torch"):
        raise ValueError(
            f"unknown kernels {kernels!r}; use 'auto', 'triton' or 'torch'."
        )
    # Deterministic mode also requires that other sequences do not change a sequence's
    # bits, so the front is then batch-invariant.
    batch_invariant = bits >= Bits.DETERMINISTIC
    if kernels == "torch":
        return PlainFront(table, operands, batch_invariant)
    device_of_kernels = device
    if kernels == "triton":
        # the caller vouches for the device; Triton's interpreter runs on a CPU
        device_of_kernels = "cuda"
    why = why_not_triton(device_of_kernels, rows_dtype, taps)
    if why is None:
        from .launches import TritonFront, gates_without_kernels

        lacking = gates_without_kernels(table)
        if not lacking:
            return TritonFront(table, operands, batch_invariant)
        why = (
            f"the gates {', '.join(lacking)} have no functions in "
            "ops/front/gate_kernels.py"
        )
    if kernels == "triton":
        raise ValueError(f"kernels='triton': {why}. Use 'auto' or 'torch'.")
    log_obstacle_once(f"conv, gates and norm run in plain torch: {why}.", device)
    return PlainFront(table, operands, batch_invariant)
