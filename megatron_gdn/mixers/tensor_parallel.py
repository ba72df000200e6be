"""Tensor parallelism of a mixer's parameters: initial values, marks and process groups.

Initial values do not depend on the number of ranks: every rank draws the whole
parameter from the same seed and keeps its share. *Marks* are attributes that tell
Megatron a parameter's split, gradient sum and precision. torch loses marks, for example
in ``copy.deepcopy`` and ``fully_shard``, and a lost mark gives a wrong gradient without
an error. So a mixer puts lost marks back.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from ..compat.observe import log_once
from ..compat.versions import MUON_KNOWS_ATTENTION_ALONE
from ..ops.layout import layout_of_in_proj
from .loader_layout import launch_arguments
from .precision import mark_keep_in_fp32, replace_fully_shard_in_megatron
from .tensor_map import take_share

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from ..compat.state_dict import StateDict
    from .interface import Mixer


def device_for(config: TransformerConfig) -> torch.device:
    """The device of a mixer's own parameters: the CPU or the current GPU, as ``config``
    says."""
    # Never the meta device: Megatron initialises no module after ``to_empty``, and
    # Megatron-FSDP would initialise the projections again after it has sharded them.
    if config.use_cpu_initialization or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def mark_sharded(parameter: nn.Parameter, sections: Sequence[int]) -> None:
    """Mark ``parameter``, whose rows form sections of ``sections`` rows; each section
    is split over tensor-parallel ranks."""
    vars(parameter).update(
        tensor_model_parallel=True, partition_dim=0, partition_stride=1
    )
    vars(parameter).update(partition_sizes=list(sections))


def mark_packed(linear: nn.Module, sections: Sequence[int], use_muon: bool) -> None:
    """Mark a column-parallel linear whose rows are several sections, each split by
    itself.

    Megatron's resharding reads ``partition_sizes``, and Megatron's Muon
    ``qkv_split_shapes``.
    ``use_muon``: whether Muon, and not Adam, updates the linear.
    """
    sizes = list(sections)
    muon_splits = not MUON_KNOWS_ATTENTION_ALONE.is_present()
    if not muon_splits:
        log_once(
            "megatron_gdn: Muon of this megatron-core would orthogonalise in_proj as "
            "one matrix. Install megatron-core 0.19 or later to train with Muon."
        )
    for parameter in (getattr(linear, "weight", None), getattr(linear, "bias", None)):
        if isinstance(parameter, nn.Parameter):
            vars(parameter).update(partition_sizes=sizes, use_muon=use_muon)
            if parameter.ndim == 2 and muon_splits:
                vars(parameter).update(is_qkv=True, qkv_split_shapes=sizes)


def mark_heads(weight: nn.Parameter, rows: Sequence[int]) -> None:
    """Let Megatron's Muon update ``weight`` in pieces of ``rows`` rows, the heads of
    this rank."""
    if not MUON_KNOWS_ATTENTION_ALONE.is_present():
        vars(weight).update(is_qkv=True, qkv_split_shapes=list(rows))


def check_muon_of_heads(tp_size: int) -> None:
    """Raise a ValueError if the launch's settings of Muon join heads; without a launch,
    log what to set."""
    launch = launch_arguments()
    if "muon" not in str(launch.get("optimizer", "muon")):
        return
    if launch.get("muon_split_qkv") is False:
        raise ValueError(
            "muon_per_head and --muon-no-split-qkv contradict each other: the flag "
            "makes in_proj one matrix. Leave one of them out."
        )
    mode = launch.get("muon_tp_mode")
    if tp_size == 1 or mode == "blockwise":
        return
    why = (
        "Megatron's Muon joins each head with the same head of the other "
        "tensor-parallel ranks."
    )
    if mode is not None:
        raise ValueError(
            f"muon_per_head over {tp_size} tensor-parallel ranks, with --muon-tp-mode "
            f"{mode}: {why} Use --muon-tp-mode blockwise."
        )
    log_once(
        f"muon_per_head over {tp_size} tensor-parallel ranks needs "
        f"OptimizerConfig(muon_tp_mode='blockwise'); in its other modes {why}",
        logging.WARNING,
    )


_MARK_OF_MARKED = "marked_by_gdn"  # the attribute that tells that a parameter has marks


def _is_plain_value(value: object) -> bool:
    """Whether ``value`` is None, a bool, a number or a string, or a list or tuple of
    these."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain_value, value))
    return value is None or isinstance(value, bool | int | float | str)


class MarkedParameters(nn.Module):
    """Mixin of a module that stores its parameters' marks (plain attributes), by
    parameter name.

    New parameters are marked when the module is moved, cast, loaded, copied or
    unpickled, and before any code iterates over its modules or parameters.
    """

    _marks: dict[str, dict[str, object]] = {}  # noqa: RUF012  empty before remember_marks

    def remember_marks(self) -> None:
        """Store the marks that parameters have now: parameter name -> attribute ->
        value.

        A mark is an attribute with a public name and a plain value. Call this method
        again to store marks that were set later.
        """
        self._marks = {}
        for name, parameter in self._parameters_by_name():
            marks = {
                k: v
                for k, v in vars(parameter).items()
                if k[0] != "_" and _is_plain_value(v)
            }
            self._marks[name] = {**marks, _MARK_OF_MARKED: True}
            setattr(parameter, _MARK_OF_MARKED, True)
        # The hook is no method: copies of this module would call it on this module.
        self.register_load_state_dict_post_hook(_mark_loaded)

    def mark_parameters(self) -> None:
        """Put the stored marks (attributes) on new parameters."""
        for name, parameter in self._parameters_by_name():
            if name in self._marks and not hasattr(parameter, _MARK_OF_MARKED):
                vars(parameter).update(self._marks[name])

    def _parameters_by_name(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter with its full name; a shared parameter under all its
        names."""
        for path, module in super().named_modules(remove_duplicate=False):
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield f"{path}.{name}" if path else name, parameter

    def named_modules(
        self, *args: Any, **kwargs: Any
    ) -> Generator[tuple[str, nn.Module]]:
        """First put the stored marks on new parameters, then do what torch's method
        does."""
        self.mark_parameters()
        yield from super().named_modules(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True):
        """Move or cast as torch does; new parameters get all attributes of the old
        ones."""
        attributes = {name: dict(vars(p)) for name, p in self._parameters_by_name()}
        result = super()._apply(fn, recurse)
        for name, parameter in self._parameters_by_name():
            vars(parameter).update(attributes[name] | vars(parameter))
        return result

    def __setstate__(self, state: StateDict) -> None:
        super().__setstate__(state)
        self.mark_parameters()


def _mark_loaded(module: MarkedParameters, incompatible_keys: object) -> None:
    """Mark new parameters after a load; torch passes ``incompatible_keys``, which is
    not used."""
    module.mark_parameters()


def add_parameter(
    mixer: Mixer,
    name: str,
    sections: Sequence[int],
    *shape: int,
    dtype: torch.dtype | None = None,
) -> None:
    """Add a parameter ``[sum(sections), *shape]`` with this rank's rows of each
    section."""
    if dtype is None:
        dtype = mixer.config.params_dtype
    empty = torch.empty(
        sum(sections), *shape, dtype=dtype, device=device_for(mixer.config)
    )
    parameter = nn.Parameter(empty)
    mark_sharded(parameter, sections)
    mixer.register_parameter(name, parameter)


def add_conv(mixer: Mixer, bias: bool) -> None:
    """Add the convolution's weight ``[C, 1, W]`` and, if ``bias``, its bias ``[C]``.

    They are parameters of the mixer, or with ``conv_is_module`` of its submodule
    ``conv1d``.
    """
    layout = mixer.dims.layout
    taps = mixer.dims.conv_kernel_dim
    if not mixer.conv_is_module:
        add_parameter(mixer, "conv1d_weight", layout.conv_widths, 1, taps)
        if bias:
            add_parameter(mixer, "conv1d_bias", layout.conv_widths)
        else:
            mixer.conv1d_bias = None
        return
    # Without skip_init, torch would draw a number for each weight on this rank, so all
    # later random numbers would depend on the tensor-parallel size.
    channels = layout.conv_width
    mixer.conv1d = nn.utils.skip_init(
        nn.Conv1d,
        channels,
        channels,
        taps,
        groups=channels,
        bias=bias,
        padding=taps - 1,
        device=device_for(mixer.config),
        dtype=mixer.config.params_dtype,
    )
    for parameter in mixer.conv1d.parameters():
        mark_sharded(parameter, layout.conv_widths)


def add_fp32(mixer: Mixer) -> None:
    """Add this rank's share of the fp32 parameters that ``mixer.fp32`` lists."""
    replace_fully_shard_in_megatron()
    for record in sorted(mixer.fp32, key=lambda x: not x.registered_first):
        count = record.count(mixer.dims.layout)
        add_parameter(mixer, record.name, (count,), dtype=torch.float32)
        mark_keep_in_fp32(mixer.get_parameter(record.name))


def reset_parameters(mixer: Mixer) -> None:
    """Set all parameters' initial values, the same values at every tensor-parallel
    size.

    ============================  ===============================================
    parameter                     value
    ============================  ===============================================
    in_proj, KDA's projections    ``config.init_method``
    out_proj                      ``config.output_layer_init_method``
    convolution, weight and bias  U(-conv_init, conv_init), default 1 / sqrt(W);
                                  Mamba2's bias always has the default
    A_log, dt_bias, D             ``first_values`` of their records in ``mixer.fp32``
    Mamba2's norm                 1
    ============================  ===============================================

    If ``config.perform_initialization`` is off, in_proj and out_proj keep their values.
    """
    whole = mixer.global_dims
    config = mixer.config
    group = mixer.tp_group
    fill = partial(fill_share, group)
    if config.perform_initialization:
        assert config.init_method is not None
        assert config.output_layer_init_method is not None
        rows = layout_of_in_proj(whole).widths
        columns = whole.state.heads * whole.state.columns
        fill(getattr(mixer.in_proj, "weight", None), config.init_method, 0, rows)
        method = config.output_layer_init_method
        fill(getattr(mixer.out_proj, "weight", None), method, 1, (columns,))
    bound = whole.conv_kernel_dim**-0.5
    widths = whole.layout.conv_widths
    if mixer.conv_init is None:
        of_weight = bound
    else:
        of_weight = mixer.conv_init
    if mixer.conv_init_bounds_bias:
        of_bias = of_weight
    else:
        of_bias = bound
    weight, bias = mixer.conv_parameters
    fill(weight, lambda x: x.uniform_(-of_weight, of_weight), 0, widths)
    fill(bias, lambda x: x.uniform_(-of_bias, of_bias), 0, widths)
    mixer._init_others()
    for record in mixer.fp32:
        parameter = getattr(mixer, record.name)
        first_values = record.first_values
        if callable(first_values):
            method = partial(first_values, mixer)
            fill(parameter, method, 0, (len(parameter) * group.size(),))
        else:
            nn.init.constant_(parameter, first_values)


@torch.no_grad()
def fill_share(
    group: dist.ProcessGroup | None,
    parameter: Tensor | None,
    method: Callable[[Tensor], object],
    dim: int,
    sections: Sequence[int],
) -> None:
    """Fill the parameter of all ranks by ``method``; copy this rank's share to
    ``parameter``.

    ``group`` is the tensor-parallel group; None: every rank has the whole parameter.
    ``sections`` are sizes of all ranks' parameter along ``dim``; each is split by
    itself.
    """
    if parameter is None:
        return
    # The seed is from the CPU's generator, which Megatron keeps equal on
    # tensor-parallel ranks.
    seed = int(torch.randint(2**62, (), device="cpu"))
    if parameter.is_meta:
        return
    shape = list(parameter.shape)
    shape[dim] = sum(sections)
    whole = torch.empty(shape, dtype=torch.float32, device=parameter.device)
    if parameter.is_cuda:
        on_gpu = [parameter.device]
    else:
        on_gpu = []
    with torch.random.fork_rng(devices=on_gpu):
        if on_gpu:
            with torch.cuda.device(parameter.device):
                torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)
        method(whole)
    if group is None:
        parameter.copy_(whole)
        return
    rank = group.rank()
    size = group.size()
    parameter.copy_(take_share(whole, dim, sections, rank, size))


def copy_with_same_groups[Module: nn.Module](
    module: Module, memo: dict[int, object]
) -> Module:
    """A copy of a layer that shares the process groups, since torch cannot copy
    groups."""
    for part in module.modules():
        for thing in vars(part).values():
            if isinstance(thing, dist.ProcessGroup | ProcessGroupCollection):
                memo[id(thing)] = thing
    kind = type(module)
    made = kind.__new__(kind)
    memo[id(module)] = made
    made.__setstate__(copy.deepcopy(module.__dict__, memo))
    return made


def require_same_tensor_ranks(
    mine: dist.ProcessGroup, groups: ProcessGroupCollection
) -> None:
    """Refuse groups whose tensor-parallel group has other ranks than ``mine``, the
    layer's."""
    tp = getattr(groups, "tp", None)
    ranks = dist.get_process_group_ranks
    if tp is None or tp is mine or ranks(tp) == ranks(mine):
        return
    raise ValueError(
        f"pg_collection has a tensor-parallel group of {tp.size()} ranks {ranks(tp)}, "
        f"and this layer holds its share of the parameters among {mine.size()} ranks "
        f"{ranks(mine)}. Only the context-parallel group of a built layer can change."
    )


def cp_group_of(
    mixer: Mixer, groups: ProcessGroupCollection, context: object
) -> dist.ProcessGroup:
    """The ``cp`` group of ``groups``; raise if a forward with ``context`` cannot use
    it."""
    require_same_tensor_ranks(mixer.tp_group, groups)
    if context is not None and groups.cp.size() != mixer.cp_size:
        raise NotImplementedError(
            f"generation with a context-parallel group of {groups.cp.size()} ranks for "
            f"one forward, in a layer with {mixer.cp_size}: set the layer's "
            "pg_collection."
        )
    return groups.cp
