"""The sizes of a Mamba2 mixer and of one rank's share of the mixer, and a check of the
constructor's arguments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..context_parallel.headwise.functional import mamba_layout
from ..ops.layout import Layout, SizeError, require_shares, require_sizes
from ..ops.state_maps.state_map import StateShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Dims:
    """Sizes of a Mamba2 mixer, or of one tensor-parallel rank's share of the mixer."""

    hidden_size: int  # the model's; never split
    num_heads: int  # heads of x; each has a state
    num_groups: int  # groups of neighbouring heads that use the same B and C
    head_dim: int  # channels of x per head, columns of a state
    state_dim: int  # width of B and C, rows of a state
    conv_kernel_dim: int

    def __post_init__(self) -> None:
        """Raise an error unless all sizes are at least 1, and groups divide the
        heads."""
        require_sizes(self)
        if self.num_heads % self.num_groups:
            raise SizeError(
                f"num_heads={self.num_heads} is not a multiple of "
                f"num_groups={self.num_groups}; every group must serve the same number "
                "of heads. Change mamba_num_heads or mamba_num_groups."
            )

    @classmethod
    def from_config(
        cls, config: Any, d_model: int, d_conv: int, expand: int | float
    ) -> Mamba2Dims:
        """The sizes in the ``mamba_*`` fields of a ``TransformerConfig``.

        ``d_model``, ``d_conv``, ``expand``: arguments of the mixer's constructor.
        ``expand`` gives the number of heads if the config does not.

        Raises:
            SizeError: sizes that do not fit each other.
        """
        heads = config.mamba_num_heads
        if heads is None:
            inner = int(expand * d_model)
            if not config.mamba_head_dim or inner % config.mamba_head_dim:
                raise SizeError(
                    f"expand={expand} times d_model={d_model} gives {inner} channels, "
                    "which do not divide into heads of "
                    f"mamba_head_dim={config.mamba_head_dim}. Set mamba_num_heads, or "
                    "sizes that divide."
                )
            heads = inner // config.mamba_head_dim
        return cls(
            hidden_size=d_model,
            num_heads=heads,
            num_groups=config.mamba_num_groups,
            head_dim=config.mamba_head_dim,
            state_dim=config.mamba_state_dim,
            conv_kernel_dim=d_conv,
        )

    @property
    def d_inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def layout(self) -> Layout:
        """The columns z | x | B | C | dt of a projection row."""
        return mamba_layout(
            self.num_heads, self.num_groups, self.head_dim, self.state_dim
        )

    @property
    def state_shape(self) -> StateShape:
        return StateShape(self.num_heads, self.state_dim, self.head_dim, diagonal=True)

    def shard(self, ranks: int) -> Mamba2Dims:
        """The sizes on one of ``ranks`` tensor-parallel ranks. A group and its heads
        are on one rank."""
        heads = self.num_heads
        groups = self.num_groups
        require_shares(ranks, (groups,), f"{groups} groups of {heads} Mamba2 heads")
        return replace(self, num_heads=heads // ranks, num_groups=groups // ranks)


def refuse_unsupported_arguments(
    norm_before_gate: bool, dt_init: str, dt_scale: float, bias: bool
) -> None:
    """Refuse values that Megatron's constructor takes but Megatron's mixer ignores."""
    for name, value, legal in (
        ("norm_before_gate", norm_before_gate, False),
        ("dt_init", dt_init, "random"),
        ("dt_scale", dt_scale, 1.0),
        ("bias", bias, False),
    ):
        if value != legal:
            raise ValueError(f"Mamba2Mixer takes {name}={legal!r} only, got {value!r}.")
