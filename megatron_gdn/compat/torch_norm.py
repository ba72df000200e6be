"""RMSNorm in plain torch, for machines without Transformer Engine."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class TorchRMSNorm(nn.Module):
    """RMSNorm over the last dimension.

        y = x * rsqrt(mean(x^2) + eps) * gamma

    gamma is ``weight``, or ``1 + weight`` if ``config.layernorm_zero_centered_gamma``;
    ``config.params_dtype`` is the dtype of ``weight``. The mean and the products are
    computed in fp32 (fp64 for an fp64 ``x``); y has the shape and dtype of x. Under
    sequence parallelism the weight is marked, so that Megatron sums the weight's
    gradient over the ranks.

    Raises:
        ValueError: ``config.normalization`` is not ``"RMSNorm"``.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5
    ) -> None:
        """Make ``weight`` ``[hidden_size]`` with gamma 1 on the current GPU, or on the
        CPU."""
        super().__init__()
        if config.normalization != "RMSNorm":
            raise ValueError(
                f"TorchRMSNorm cannot compute normalization={config.normalization!r}: "
                "set "
                'normalization="RMSNorm" or use a Transformer Engine spec.'
            )
        self.hidden_size = hidden_size
        self.eps = eps
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        on_cpu = config.use_cpu_initialization or not torch.cuda.is_available()
        if on_cpu:
            device = "cpu"
        else:
            device = torch.cuda.current_device()
        empty = torch.empty(hidden_size, dtype=config.params_dtype, device=device)
        self.weight = nn.Parameter(empty)
        # Megatron sums the gradients of marked parameters over tensor-parallel ranks.
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill ``weight`` with the value that makes gamma 1."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed ``y`` of ``x``, both ``[..., hidden_size]``."""
        wide = torch.promote_types(x.dtype, torch.float32)
        gamma = self.weight.to(wide)
        if self.zero_centered_gamma:
            gamma = gamma + 1.0
        return nn.functional.rms_norm(
            x.to(wide), (self.hidden_size,), gamma, self.eps
        ).to(x.dtype)

    def extra_repr(self) -> str:
        """The sizes that torch prints in the module's ``repr``."""
        return (
            f"{self.hidden_size}, eps={self.eps}, "
            f"zero_centered_gamma={self.zero_centered_gamma}"
        )
