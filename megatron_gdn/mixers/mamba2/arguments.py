"""Checks of the arguments of a Mamba2 mixer's constructor, and the config's fields about it."""

from __future__ import annotations

from ..ignored_fields import ConfigFields

MAMBA2_FIELDS = ConfigFields(
    prefixes=("mamba_", "use_mamba_"),
    read=("mamba_head_dim", "mamba_num_groups", "mamba_num_heads", "mamba_state_dim"),
    without_effect={
        "mamba_training_ssm_states_dtype": "the recurrence chooses its states' dtype",
        "use_mamba_mem_eff_path": "convolution and recurrence are always one autograd function",
    },
)


def refuse_unsupported_arguments(
    norm_before_gate: bool, dt_init: str, dt_scale: float, bias: bool
) -> None:
    """Refuse arguments of Megatron's constructor that Megatron does not honour either.

    Raises:
        ValueError: one of them has another value than the one that is legal.
    """
    given = {
        "norm_before_gate": (norm_before_gate, False),
        "dt_init": (dt_init, "random"),
        "dt_scale": (dt_scale, 1.0),
        "bias": (bias, False),
    }
    for name, (value, legal) in given.items():
        if value != legal:
            raise ValueError(f"Mamba2Mixer takes {name}={legal!r} only, got {value!r}.")


def check_ranges(
    A_init_range: tuple[float, float],
    dt_init_range: tuple[float, float],
    dt_init_floor: float,
    dt_limit: tuple[float, float],
) -> None:
    """Refuse ranges that nothing can be drawn from, or clamped to.

    Raises:
        ValueError: names the range and what it must be.
    """
    for name, (low, high) in {
        "A_init_range": A_init_range,
        "dt_min, dt_max": dt_init_range,
    }.items():
        if not 0 < low <= high:
            raise ValueError(
                f"{name} = ({low}, {high}) must be (low, high) with 0 < low <= high: its logarithm "
                f"is taken."
            )
    if not dt_init_floor > 0:
        raise ValueError(f"dt_init_floor={dt_init_floor} must be above 0.")
    if len(dt_limit) != 2 or not 0 <= dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"dt_limit={dt_limit} must be (least, greatest) with 0 <= least.")
