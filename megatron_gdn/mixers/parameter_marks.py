"""Keeps the marks that Megatron reads on parameters when torch replaces the parameter objects.

Megatron reads from a parameter's attributes how it is split over tensor-parallel ranks, whether its
gradient is summed over them and in which precision it is held. torch makes new parameters without
these attributes in ``to_empty``, ``load_state_dict(assign=True)``, ``copy.deepcopy``,
``nn.utils.swap_tensors`` and ``fully_shard``. A lost mark gives a wrong gradient without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

# This attribute is set on every marked parameter; a parameter without it is new.
_MARKED = "marked_by_gdn"


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str)


class MarkedParameters(nn.Module):
    """Mixin for modules: their parameters' marks belong to the names, not to the objects.

    The module calls :meth:`remember_marks` once, when its parameters are built and marked. New
    parameters under the same names are marked again

    - when the module is moved or cast, loaded, copied or unpickled;
    - before any code iterates over its modules or parameters (optimizers, data-parallel wrappers
      and ``finalize_model_grads`` call ``named_parameters()`` of the model). This covers
      replacements that call no method of this module.
    """

    _marks: dict[str, dict[str, Any]] = {}  # noqa: RUF012  none before remember_marks

    def remember_marks(self) -> None:
        """Make the table of marks, parameter name -> attribute -> value, from what is set now.

        A mark is an attribute with a public name and a plain value (bool, number, string, list).
        A mark that is set later stays on its parameter through moves and casts, but a new parameter
        object gets only the marks in the table. Call this again to add later marks to the table.
        """
        self._marks = {}
        for name, parameter in self._parameters_by_name():
            marks = {k: v for k, v in vars(parameter).items() if k[0] != "_" and _is_plain(v)}
            self._marks[name] = {**marks, _MARKED: True}
            setattr(parameter, _MARKED, True)
        self.register_load_state_dict_post_hook(_mark_loaded)

    def mark_parameters(self) -> None:
        """Mark the parameters that are new since the last call; those with marks keep theirs."""
        for name, parameter in self._parameters_by_name():
            if name in self._marks and not hasattr(parameter, _MARKED):
                for mark, value in self._marks[name].items():
                    setattr(parameter, mark, value)

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
