"""The attributes and methods of a mixer that the functions of this folder read.

`.base` imports these functions, so they cannot import its class `RecurrentMixer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..ops.stages import Stages
from .fp32_parameters import Fp32Parameter

if TYPE_CHECKING:
    from ..compat.state_dict import StateDict


class Mixer(Protocol):
    """The type of a :class:`.base.RecurrentMixer`, which describes each member."""

    layer_number: int | None
    pp_layer_offset: int
    tp_group: ProcessGroup
    tp_size: int
    # the sizes over all tensor-parallel ranks, and on this rank; each mixer has its own
    # class for them
    global_dims: Any
    dims: Any
    fp32: tuple[Fp32Parameter, ...]
    in_proj: Any
    out_proj: Any
    conv1d: Any
    conv1d_bias: nn.Parameter | None
    conv_init: float | None
    conv_is_module: ClassVar[bool]
    conv_init_bounds_bias: ClassVar[bool]
    scripts_split_in_proj: ClassVar[bool]
    parameters_split_by_heads: ClassVar[tuple[str, ...]]
    state_transposed: ClassVar[bool]
    _keep_in_float32_parameter_names: tuple[str, ...]

    @property
    def config(self) -> TransformerConfig: ...

    @property
    def pg_collection(self) -> ProcessGroupCollection: ...

    @property
    def cp_size(self) -> int: ...

    @property
    def conv_parameters(self) -> tuple[Tensor, Tensor | None]: ...

    def stages_of_whole_sequences(self, rows: Tensor) -> Stages: ...

    def ssm_decode(
        self,
        projected: Tensor,
        conv_state: Tensor,
        ssm_state: Tensor,
        batch_indices: Tensor | None = None,
        intermediate_conv_state: Tensor | None = None,
        intermediate_ssm_state: Tensor | None = None,
    ) -> Tensor: ...

    def ssm_prefill(
        self, projected: Tensor, conv_state: Tensor, ssm_state: Tensor, context: object
    ) -> Tensor: ...

    def _init_further_parameters(self) -> None: ...

    # methods of torch.nn.Module

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...

    def named_children(self) -> Iterator[tuple[str, nn.Module]]: ...

    def get_parameter(self, target: str) -> nn.Parameter: ...

    def get_submodule(self, target: str) -> nn.Module: ...

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None: ...

    def _save_to_state_dict(
        self, destination: StateDict, prefix: str, keep_vars: bool
    ) -> None: ...
