"""Tensor parallelism of a mixer's parameters: initial values, marks and process groups.

Initial values do not depend on the number of ranks: every rank draws the whole
parameter from the same seed and keeps its share. *Marks* are attributes of a parameter.
They tell Megatron how the parameter is split, over which ranks its gradient is summed,
and in which precision it stays. torch loses marks, for example in ``copy.deepcopy`` and
``fully_shard``, and a lost mark gives a wrong gradient without an error. So a mixer
puts lost marks back.
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
from ..compat.versions import MUON_SPLITS_AS_ATTENTION
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
    """Mark ``parameter`` as split over tensor-parallel ranks along dimension 0.

    ``sections`` has the number of this rank's rows in each section; every section is
    split by itself.
    """
    vars(parameter).update(
        tensor_model_parallel=True,
        partition_dim=0,
        partition_stride=1,
        partition_sizes=list(sections),
    )


def mark_packed(linear: nn.Module, sections: Sequence[int], use_muon: bool) -> None:
    """Mark the parameters of a column-parallel linear whose rows form several sections.

    So "packed" means here several matrices in one linear, not packed documents.
    Megatron's resharding reads the mark ``partition_sizes``, and Megatron's Muon reads
    ``qkv_split_shapes``. Muon before 0.19 would ignore these sizes and cut in_proj by
    the sizes of attention's heads. So there the mark is not set, and a log line warns
    of Muon. ``use_muon``: whether Muon, and not Adam, updates the linear. Megatron reads
    ``use_muon`` only after 0.19, so the log line does not depend on ``use_muon``.
    ``sections`` has the number of this rank's rows in each section.
    """
    sizes = list(sections)
    muon_splits = not MUON_SPLITS_AS_ATTENTION.is_present()
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
    """Let Megatron's Muon orthogonalise the heads of ``weight`` one by one; ``rows``
    has the number of rows of each head of this rank.

    Muon before 0.19 can only cut by the sizes of attention's heads, so there the mark
    is not set.
    """
    if not MUON_SPLITS_AS_ATTENTION.is_present():
        vars(weight).update(is_qkv=True, qkv_split_shapes=list(rows))


def check_muon_of_heads(tp_size: int) -> None:
    """Raise a ValueError if the launch's settings of Muon contradict
    :func:`mark_heads`; without a launch, log what to set.

    A mixer with the option ``muon_per_head`` calls this; ``tp_size`` is its number of
    tensor-parallel ranks.
    """
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


_MARKED_ATTRIBUTE = "marked_by_gdn"  # True on each parameter that has its marks


def _is_plain_value(value: object) -> bool:
    """Whether ``value`` is None, a bool, a number or a string, or a list or tuple of
    these."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain_value, value))
    return value is None or isinstance(value, bool | int | float | str)


class MarkedParameters(nn.Module):
    """Mixin of a module that stores its parameters' marks, and puts them on parameters
    that replace the first ones.

    New parameters get the marks when the module is moved, cast, loaded, copied or
    unpickled. They also get the marks before any code iterates over the module's
    modules or parameters.
    """

    # parameter name -> attribute -> value; empty before remember_marks
    _marks: dict[str, dict[str, object]] = {}  # noqa: RUF012

    def remember_marks(self) -> None:
        """Store the marks that parameters have now.

        A mark is an attribute with a public name and a plain value. Call this method
        again to store marks that were set later.
        """
        self._marks = {}
        for name, parameter in self._parameters_by_name():
            setattr(parameter, _MARKED_ATTRIBUTE, True)
            self._marks[name] = {
                attribute: value
                for attribute, value in vars(parameter).items()
                if attribute[0] != "_" and _is_plain_value(value)
            }
        # A function, not a method: a copy of this module would call the original's
        # method.
        self.register_load_state_dict_post_hook(_mark_loaded)

    def mark_parameters(self) -> None:
        """Put the stored marks on parameters that have none."""
        for name, parameter in self._parameters_by_name():
            if name in self._marks and not hasattr(parameter, _MARKED_ATTRIBUTE):
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
        """torch's method, after :meth:`mark_parameters`; torch's ``parameters()`` calls
        it too."""
        self.mark_parameters()
        yield from super().named_modules(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True):
        """Move or cast as torch does, by ``fn`` for each tensor; new parameters get all
        attributes of the old ones."""
        attributes = {name: dict(vars(p)) for name, p in self._parameters_by_name()}
        result = super()._apply(fn, recurse)
        for name, parameter in self._parameters_by_name():
            vars(parameter).update(attributes[name] | vars(parameter))
        return result

    def __setstate__(self, state: StateDict) -> None:
        super().__setstate__(state)
        self.mark_parameters()


def _mark_loaded(module: MarkedParameters, incompatible_keys: object) -> None:
    """torch calls this function after a load, which may have replaced parameters."""
    module.mark_parameters()


def add_parameter(
    mixer: Mixer,
    name: str,
    sections: Sequence[int],
    *shape: int,
    dtype: torch.dtype | None = None,
) -> None:
    """Register an uninitialised parameter ``[sum(sections), *shape]`` of ``mixer``.

    ``sections`` has the number of this rank's rows in each section; ``dtype`` is by
    default ``params_dtype``.
    """
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

    With ``conv_is_module`` these parameters are in a new submodule ``conv1d``, else in
    the mixer itself.
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
    # Without skip_init, torch would draw a number for each weight on this rank. Then
    # all later random numbers would depend on the tensor-parallel size.
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
    """Add this rank's share of the fp32 parameters that ``mixer.fp32`` lists.

    Torch's ``fully_shard`` gathers a group in one dtype, so ``--use-torch-fsdp2`` gets
    :func:`.precision.fully_shard` instead.
    """
    replace_fully_shard_in_megatron()
    for declared in sorted(mixer.fp32, key=lambda x: not x.is_registered_first):
        count = declared.count(mixer.dims.layout)
        add_parameter(mixer, declared.name, (count,), dtype=torch.float32)
        mark_keep_in_fp32(mixer.get_parameter(declared.name))


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
    A_log, dt_bias, D             their ``first_values`` in ``mixer.fp32``
    Mamba2's norm                 1
    ============================  ===============================================

    If ``config.perform_initialization`` is off, in_proj and out_proj keep their values.
    """
    global_dims = mixer.global_dims
    config = mixer.config
    group = mixer.tp_group
    # fill(parameter, method, dim, sections); each call draws a seed, so the order of
    # the calls decides the values
    fill = partial(fill_share, group)
    if config.perform_initialization:
        assert config.init_method is not None
        assert config.output_layer_init_method is not None
        rows = layout_of_in_proj(global_dims).widths
        columns = global_dims.state_shape.heads * global_dims.state_shape.columns
        fill(getattr(mixer.in_proj, "weight", None), config.init_method, 0, rows)
        method = config.output_layer_init_method
        fill(getattr(mixer.out_proj, "weight", None), method, 1, (columns,))
    default_bound = global_dims.conv_kernel_dim**-0.5
    channels = global_dims.layout.conv_widths
    if mixer.conv_init is None:
        weight_bound = default_bound
    else:
        weight_bound = mixer.conv_init
    if mixer.conv_init_bounds_bias:
        bias_bound = weight_bound
    else:
        bias_bound = default_bound
    weight, bias = mixer.conv_parameters
    fill(weight, lambda x: x.uniform_(-weight_bound, weight_bound), 0, channels)
    fill(bias, lambda x: x.uniform_(-bias_bound, bias_bound), 0, channels)
    mixer._init_further_parameters()
    for declared in mixer.fp32:
        parameter = getattr(mixer, declared.name)
        first_values = declared.first_values
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
    """Fill ``parameter``, this rank's share, with the same values at every size of
    ``group``.

    Each rank draws the values of all ranks from a common seed, and keeps its share.

    Args:
        group: the tensor-parallel group; None: every rank has the whole parameter.
        parameter: None (no such parameter): nothing happens.
        method: fills an fp32 tensor in place.
        dim: the dimension that is split over ranks.
        sections: the sizes along ``dim`` of all ranks together; each section is split
            by itself.
    """
    if parameter is None:
        return
    # The seed is from the CPU's generator, which Megatron keeps equal on
    # tensor-parallel ranks. It is drawn for a parameter on the meta device too, so
    # later parameters get the same values.
    seed = int(torch.randint(2**62, (), device="cpu"))
    if parameter.is_meta:
        return
    shape = list(parameter.shape)
    shape[dim] = sum(sections)
    full = torch.empty(shape, dtype=torch.float32, device=parameter.device)
    if parameter.is_cuda:
        gpus = [parameter.device]
    else:
        gpus = []
    with torch.random.fork_rng(devices=gpus):
        if gpus:
            with torch.cuda.device(parameter.device):
                torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)
        method(full)
    if group is None:
        parameter.copy_(full)
        return
    rank = group.rank()
    size = group.size()
    parameter.copy_(take_share(full, dim, sections, rank, size))


def copy_with_same_groups[Module: nn.Module](
    module: Module, memo: dict[int, object]
) -> Module:
    """A copy of a layer that shares the process groups, since torch cannot copy
    groups."""
    # deepcopy does not copy what its memo has
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, dist.ProcessGroup | ProcessGroupCollection):
                memo[id(value)] = value
    cls = type(module)
    copied = cls.__new__(cls)
    memo[id(module)] = copied  # a part may refer to the module
    copied.__setstate__(copy.deepcopy(module.__dict__, memo))
    return copied


def require_same_tensor_ranks(
    mine: dist.ProcessGroup, groups: ProcessGroupCollection
) -> None:
    """Raise a ValueError if ``groups.tp`` has other ranks than ``mine``, the layer's
    tensor-parallel group."""
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
    """``groups.cp``, if a forward of ``mixer`` can use it.

    ``context`` is the forward's inference context or None. Raises a ValueError if the
    tensor-parallel ranks differ, and a NotImplementedError if generation would get
    another context-parallel size than the layer's.
    """
    require_same_tensor_ranks(mixer.tp_group, groups)
    if context is not None and groups.cp.size() != mixer.cp_size:
        raise NotImplementedError(
            f"generation with a context-parallel group of {groups.cp.size()} ranks for "
            f"one forward, in a layer with {mixer.cp_size}: set the layer's "
            "pg_collection."
        )
    return groups.cp
