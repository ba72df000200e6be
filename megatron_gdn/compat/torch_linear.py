"""A linear with one weight on all tensor-parallel ranks, for machines without
Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

if TYPE_CHECKING:
    from .state_dict import StateDict


class DuplicatedLinear(nn.Module):
    """``x W^T + bias`` with the whole W on every tensor-parallel rank:
    ``[..., input_size]`` to ``[..., output_size]``.

    The arguments are those of Megatron's ``TELinear``; ``parallel_mode`` must be
    ``"duplicated"``. ``options`` takes the arguments that change nothing in plain
    torch. The forward adds the bias, and returns the output and None. In place of None
    Megatron's linears return a bias, which the caller adds.

    Raises:
        ValueError: another ``parallel_mode``, or ``skip_bias_add`` with a bias.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str | None,
        config: TransformerConfig,
        init_method: Callable[[Tensor], object],
        bias: bool = False,
        skip_bias_add: bool = False,
        **options: object,
    ) -> None:
        """Make ``weight`` ``[output_size, input_size]`` and, if ``bias``, a bias of
        zeros; ``options`` are ignored."""
        super().__init__()
        if parallel_mode != "duplicated" or (bias and skip_bias_add):
            raise ValueError(
                f"parallel_mode={parallel_mode!r}, skip_bias_add={skip_bias_add}: a "
                "DuplicatedLinear has parallel_mode='duplicated' and adds its bias. "
                "Use Megatron's ColumnParallelLinear for a split weight."
            )
        self.config = config
        device: str | int = "cpu"
        if not config.use_cpu_initialization and torch.cuda.is_available():
            device = torch.cuda.current_device()
        dtype = config.params_dtype
        empty = torch.empty(output_size, input_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty)
        self.register_parameter("bias", None)
        if bias:
            self.bias = nn.Parameter(empty.new_zeros(output_size))
        if config.perform_initialization:
            with torch.no_grad():
                init_method(self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return nn.functional.linear(x, self.weight, self.bias), None

    def get_extra_state(self) -> None:
        """Return None, so that state dicts get an empty entry as from Megatron's
        linears."""

    def set_extra_state(self, state: object) -> None:
        """Ignore the empty entry, as Megatron's linears do."""

    def _load_from_state_dict(
        self, state_dict: StateDict, prefix: str, *args: Any, **keywords: Any
    ) -> None:
        """Load as torch does; a state dict without the empty entry is legal."""
        state_dict.setdefault(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **keywords)

    def backward_dw(self) -> None:
        """Do nothing, since the backward has already computed the weight's gradient.
        Transformer Engine can delay this gradient until ``backward_dw`` is called."""
