"""The front of a Gated DeltaNet: conv + SiLU, l2norm and gates in one launch each way.

    q, k = l2norm(silu(conv(x)));  v = silu(conv(x))
    g    = -exp(A_log) * softplus(alpha + dt_bias);  beta = sigmoid(b)

With ``allow_neg_eigval`` beta is twice that, see :func:`..gates.largest_beta`.

:mod:`.front_triton` has the Triton kernels, :mod:`.front_torch` their plain twins,
:mod:`.front_conv_package` the same with another convolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..documents import Documents
from ..front.base import Parameters
from ..layout import Layout
from ..state_maps.state_map import StateShape
from .front_choice import is_triton, kernels_for
from .rule.base import RuleGrads, RuleInputs
from .rule.step import RecurrentRule
from .sizes import HeadSizes

if TYPE_CHECKING:
    from ..front.edges import Edges


@dataclass(frozen=True, eq=False)
class GDNFront:
    """Parameters: conv weight ``[C, 1, W]``, conv bias ``[C]`` or None, A_log and dt_bias ``[H]``;
    and the gates ``[S, B, 2 H]``, beta | alpha, if the rows do not hold them.

    Attributes:
        sizes: the heads of a projection row.
        kernels: :mod:`.front_triton`, :mod:`.front_torch` or :mod:`.front_conv_package`.
        normalise_qk: scale q and k to unit length.
        allow_neg_eigval: write strengths in (0, 2) instead of (0, 1).
        dtype: of q, k and v; None is the projection's.
        batch_invariant: the bits of a packed document do not depend on where it lies.
        again: inputs that the backward computes again. Of q, k and v, computing q again costs the
            least per byte that it frees.
    """

    sizes: HeadSizes
    kernels: ModuleType
    normalise_qk: bool = True
    allow_neg_eigval: bool = False
    dtype: torch.dtype | None = None
    batch_invariant: bool = False
    again: tuple[str, ...] = ("q",)

    names = RuleInputs._fields
    convolved = ("q", "k", "v")

    step_rule = RecurrentRule()

    @staticmethod
    @lru_cache(maxsize=64)
    def of(
        device: str,
        dtype: torch.dtype,
        taps: int,
        sizes: HeadSizes,
        operands: torch.dtype | None = None,
        batch_invariant: bool = False,
        normalise_qk: bool = True,
        allow_neg_eigval: bool = False,
        recompute_qkv: bool = False,
        kernels: str = "auto",
        aligned: bool = False,
    ) -> GDNFront:
        """The front of rows in ``dtype`` on a type of device.

        Args:
            operands, batch_invariant: the rule's ``operand_dtype`` and ``batch_invariant``.
            aligned: no package computes a token, see :mod:`..aligned`.

        Raises:
            ValueError: fp16 operands without ``normalise_qk``, unknown ``kernels``.
        """
        if operands is not None and not normalise_qk:
            raise ValueError(
                f"this rule takes q and k in {operands}, whose range they may leave without unit "
                f"length; pass normalise_qk=False to resolve_rule too, or choose operands='bf16'."
            )
        return GDNFront(
            sizes, kernels_for(device, dtype, taps, sizes, kernels, aligned), normalise_qk,
            allow_neg_eigval, operands, batch_invariant,
            ("q", "k", "v") if recompute_qkv else ("q",),
        )  # fmt: skip

    @property
    def layout(self) -> Layout:
        return self.sizes.layout

    @property
    def state(self) -> StateShape:
        return self.sizes.state

    @cached_property
    def triton(self) -> bool:
        return is_triton(self.kernels)

    def for_step(self, dtype: torch.dtype) -> GDNFront:
        wide = torch.promote_types(dtype, torch.float32)
        return GDNFront(self.sizes, self.kernels, self.normalise_qk, self.allow_neg_eigval, wide)

    def forward(
        self,
        proj: Tensor,
        parameters: Parameters,
        documents: Documents | None,
        only: tuple[str, ...] | None = None,
    ) -> RuleInputs:
        weight, bias, A_log, dt_bias, *apart = parameters
        return self.kernels.prepare_forward(
            proj, weight, bias, A_log, dt_bias, self.sizes, gates=apart[0] if apart else None,
            documents=documents, normalise_qk=self.normalise_qk,
            allow_neg_eigval=self.allow_neg_eigval, dtype=self.dtype,
            batch_invariant=self.batch_invariant, parts="qkvg" if only is None else "".join(only),
        )  # fmt: skip

    def backward(
        self,
        proj: Tensor,
        parameters: Parameters,
        grads: RuleGrads,
        d_proj: Tensor,
        documents: Documents | None,
    ) -> tuple[Tensor | None, ...]:
        *of_inputs, factor = grads
        weight, bias, A_log, dt_bias, *apart = parameters
        gates = apart[0] if apart else None
        d_gates = None if gates is None else torch.empty_like(gates)
        made = self.kernels.prepare_backward(
            proj, weight, bias, A_log, dt_bias, self.sizes, *of_inputs, d_proj,
            documents=documents, factor=factor, normalise_qk=self.normalise_qk,
            allow_neg_eigval=self.allow_neg_eigval, batch_invariant=self.batch_invariant,
            gates=gates, d_gates=d_gates,
        )  # fmt: skip
        return made if d_gates is None else (*made, d_gates)

    def edges(self) -> Edges | None:
        return self.kernels.edges_of(self.sizes, self.normalise_qk, self.batch_invariant)
