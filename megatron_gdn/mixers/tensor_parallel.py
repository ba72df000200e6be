"""Tensor parallelism of a mixer's parameters: their marks, summed gradients, its process groups.

Megatron reads from a parameter's attributes how it is split over ranks, whether its gradient is
summed over them and in which precision it is held. torch makes new parameters without these
attributes in ``to_empty``, ``load_state_dict(assign=True)``, ``copy.deepcopy``,
``nn.utils.swap_tensors`` and ``fully_shard``. A lost mark gives a wrong gradient without an error,
so a mixer keeps the marks by the parameters' names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from ..compat.observe import log_once
from ..ops.autograd import first_derivative_only
from .micro_batch import MicroBatches


def mark_sharded(parameter: nn.Parameter, sections: Sequence[int]) -> None:
    """Mark a parameter as split over tensor-parallel ranks along dimension 0, by sections."""
    vars(parameter).update(tensor_model_parallel=True, partition_dim=0, partition_stride=1)
    vars(parameter).update(partition_sizes=list(sections))


def mark_packed(linear: nn.Module, sections: Sequence[int], use_muon: bool) -> None:
    """Mark a column-parallel linear whose rows are several sections, each split by itself.

    Megatron's resharding reads ``partition_sizes`` (this rank's). Its Muon orthogonalises sections
    that are marked as fused Q, K and V are. ``use_muon=False`` gives the weight to Adam (main).
    """
    sizes, muon_splits = list(sections), muon_reads_sections()
    if not muon_splits:
        log_once(
            "megatron_gdn: Muon of this megatron-core would orthogonalise in_proj as one matrix. "
            "Install megatron-core 0.19 or later to train with Muon."
        )
    for parameter in (getattr(linear, "weight", None), getattr(linear, "bias", None)):
        if isinstance(parameter, nn.Parameter):
            vars(parameter).update(partition_sizes=sizes, use_muon=use_muon)
            if parameter.ndim == 2 and muon_splits:
                vars(parameter).update(is_qkv=True, qkv_split_shapes=sizes)


def muon_reads_sections() -> bool:
    """Whether Megatron's Muon (from 0.19 on) reads a parameter's own sections."""
    from megatron.core.tensor_parallel import layers

    return "qkv_split_shapes" in layers._MODEL_PARALLEL_ATTRIBUTE_DEFAULTS


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameter: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    @first_derivative_only
    def backward(ctx, gradient: Tensor):
        # A copy, because others may hold this gradient; in fp32, so that the sum is rounded once.
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.to(wide, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total.to(gradient.dtype), None


def sum_gradient(parameter: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The same values; the gradient is the sum over ``group`` (None: nothing is summed).

    For a replicated parameter that each tensor-parallel rank uses on its own heads.
    """
    if group is None or not (torch.is_grad_enabled() and parameter.requires_grad):
        return parameter
    return _SumGradient.apply(parameter, group)


@contextmanager
def gradients_summed(module: nn.Module, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Inside this context, ``module`` reads its parameters through :func:`sum_gradient`.

    Nothing else may replace the parameters meanwhile, as ``fully_shard`` of ``module`` itself does.
    """
    if group is None or not torch.is_grad_enabled():
        yield
        return
    slots: list[tuple[dict[str, Any], str, nn.Parameter]] = [
        (part._parameters, name, parameter)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None and parameter.requires_grad
    ]
    summed = {parameter: sum_gradient(parameter, group) for _, _, parameter in slots}
    for parameters, name, parameter in slots:
        parameters[name] = summed[parameter]
    replaced = []
    try:
        yield
    finally:
        for parameters, name, parameter in slots:
            if parameters.get(name) is summed[parameter]:
                parameters[name] = parameter
            else:
                replaced.append(name)
    if replaced:
        raise RuntimeError(
            f"{type(module).__name__}: {', '.join(replaced)} changed during the forward, so the "
            f"gradient cannot be summed over {group.size()} tensor-parallel ranks. Under torch's "
            f"fully_shard, shard the whole GatedDeltaNet (or the layer around it), not its norm."
        )


_MARKED = "marked_by_gdn"  # set on every marked parameter; one without it is new


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


class MarkedParameters(nn.Module):
    """Mixin for modules: their parameters' marks belong to the names, not to the objects.

    New parameters are marked again when the module is moved or cast, loaded, copied or unpickled,
    and before any code (such as optimizers) iterates over its modules or parameters.
    """

    _marks: dict[str, dict[str, Any]] = {}  # noqa: RUF012  none before remember_marks

    def remember_marks(self) -> None:
        """Make the table of marks, parameter name -> attribute -> value, from what is set now.

        A mark is an attribute with a public name and a plain value. One that is set later stays on
        its parameter through moves and casts, and a new parameter gets it after another call.
        """
        self._marks = {}
        for name, parameter in self._parameters_by_name():
            marks = {k: v for k, v in vars(parameter).items() if k[0] != "_" and _is_plain(v)}
            self._marks[name] = {**marks, _MARKED: True}
            setattr(parameter, _MARKED, True)
        self.register_load_state_dict_post_hook(_mark_loaded)

    def mark_parameters(self) -> None:
        """Mark the parameters that are new since the last call."""
        for name, parameter in self._parameters_by_name():
            if name in self._marks and not hasattr(parameter, _MARKED):
                vars(parameter).update(self._marks[name])

    def _parameters_by_name(self) -> Iterator[tuple[str, nn.Parameter]]:
        for path, module in super().named_modules(remove_duplicate=False):
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield f"{path}.{name}" if path else name, parameter

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        self.mark_parameters()
        yield from super().named_modules(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True):
        """Copy every attribute to the new parameters, also those set after the module was built."""
        attributes = {name: dict(vars(p)) for name, p in self._parameters_by_name()}
        result = super()._apply(fn, recurse)
        for name, parameter in self._parameters_by_name():
            vars(parameter).update(attributes[name] | vars(parameter))
        return result

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The last step of a deepcopy and of unpickling."""
        super().__setstate__(state)
        self.mark_parameters()


def _mark_loaded(module: MarkedParameters, incompatible_keys: object) -> None:
    module.mark_parameters()


class FollowsGroups(nn.Module):
    """Mixin of a mixer that follows its ``pg_collection``.

    Tensor-parallel ranks hold shares of the parameters, so they cannot change. All ranks of the old
    and of the new context-parallel group must change it together, between micro-batches.
    """

    micro_batches: MicroBatches
    tp_group: Any
    _pg_collection: ProcessGroupCollection

    @property
    def pg_collection(self) -> ProcessGroupCollection:
        """Process groups; setting them sets the context-parallel group of later micro-batches."""
        return self._pg_collection

    @pg_collection.setter
    def pg_collection(self, groups: ProcessGroupCollection) -> None:
        self.require_same_tensor_ranks(groups)
        self.micro_batches.use_group(groups.cp)
        self._pg_collection = groups
        self._name_sizes()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of the layer with the same process groups, which cannot be copied themselves."""
        for module in self.modules():
            for thing in vars(module).values():
                if isinstance(thing, dist.ProcessGroup | ProcessGroupCollection):
                    memo[id(thing)] = thing
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__setstate__(copy.deepcopy(self.__dict__, memo))
        return made

    @property
    def cp_size(self) -> int:
        """Ranks of the context-parallel group; another number than that is refused."""
        return self._pg_collection.cp.size()

    @cp_size.setter
    def cp_size(self, size: int) -> None:
        if size != self.cp_size:
            raise ValueError(
                f"cp_size={size} and a context-parallel group of {self.cp_size} ranks: set "
                f"pg_collection, which the size follows."
            )

    def require_same_tensor_ranks(self, groups: ProcessGroupCollection) -> None:
        tp, mine, ranks = getattr(groups, "tp", None), self.tp_group, dist.get_process_group_ranks
        if tp is None or tp is mine or ranks(tp) == ranks(mine):
            return
        raise ValueError(
            f"pg_collection has a tensor-parallel group of {tp.size()} ranks {ranks(tp)}, and "
            f"this layer holds its share of the parameters among {mine.size()} ranks "
            f"{ranks(mine)}. Only the context-parallel group of a built layer can change."
        )

    def cp_group_of(self, groups: ProcessGroupCollection, context: Any) -> Any:
        """The context-parallel group of one forward that is called with these groups."""
        self.require_same_tensor_ranks(groups)
        if context is not None and groups.cp.size() != self.cp_size:
            raise NotImplementedError(
                f"generation with a context-parallel group of {groups.cp.size()} ranks for one "
                f"forward, in a layer with {self.cp_size}: set the layer's pg_collection."
            )
        return groups.cp

    def _name_sizes(self) -> None:
        """Set the sizes that tools look up by name; a mixer with such names overrides this."""
