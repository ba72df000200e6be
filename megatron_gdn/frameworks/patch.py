"""One call after which calls of Megatron's own recurrent layers build ours.

Specs (also copied or pickled ones), partials and providers hold the class of Megatron and call it.
So its ``__new__`` is replaced and returns a layer of ours; Python then leaves out upstream's
``__init__``. A new name in a module would not reach code that has imported the class.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

logger = logging.getLogger(__name__)

# Megatron's class, and ours in its place.
_GDN = "megatron.core.ssm.gated_delta_net:GatedDeltaNet", "megatron_gdn:GatedDeltaNet"
_GDN2 = "megatron.core.ssm.gated_delta_net:GatedDeltaNet2", "megatron_gdn:GatedDeltaNet2"
_MAMBA = "megatron.core.ssm.mamba_mixer:MambaMixer", "megatron_gdn:Mamba2Mixer"
# A subclass with another order of weights, for which `.mcore_bridge` builds our layer.
_OF_MCORE_BRIDGE = "mcore_bridge.model.modules.gated_delta_net.GatedDeltaNet"

Options = bool | Mapping[str, Any]
Arguments = dict[str, inspect.Parameter]


def patch_megatron(
    *, gdn: Options = True, mamba: Options = False, gdn2: Options | None = None
) -> None:
    """Let every call of Megatron's own class build our layer, in this process, from now on.

    Older specs, partials and providers build our layer too; layers that exist do not change.
    ``patch_megatron(gdn=False)`` undoes it. Subclasses of Megatron's class, whose weights may lie
    in another order, are built as they are, with a log line; mcore-bridge's is built as ours
    (see :mod:`.mcore_bridge`).

    Args:
        gdn: for ``megatron.core.ssm.gated_delta_net.GatedDeltaNet``: True for our
            :class:`GatedDeltaNet`, False for Megatron's own, or a dict of options for ours, such as
            ``{"backend": "fla"}``. What the spec gives counts more than such an option.
        mamba: the same for ``megatron.core.ssm.mamba_mixer.MambaMixer`` and our
            :class:`Mamba2Mixer`.
        gdn2: the same for ``GatedDeltaNet2``, where Megatron has it, and ours; None: ours unless
            ``gdn`` is False.

    Raises:
        TypeError: an option that our layer does not know; or Megatron's constructor takes an
            argument that ours does not, or has another default or place for one.
        RuntimeError: other code has replaced ``__new__`` of Megatron's class.
    """
    wanted = [_Class(*_GDN, gdn), _Class(*_MAMBA, mamba)]
    if has_gdn2():
        wanted.insert(1, _Class(*_GDN2, gdn is not False if gdn2 is None else gdn2))
    for each in wanted:  # all are checked before one is changed
        each.check()
    for each in wanted:
        each.install()
    if os.environ.get("RANK", "0") == "0":
        logger.warning("; ".join(each.told() for each in wanted) + ".")


def has_gdn2() -> bool:
    """Whether this Megatron has a Gated DeltaNet-2 (main has it, 0.19 does not)."""
    return hasattr(resolve_name(_GDN2[0].partition(":")[0]), "GatedDeltaNet2")


class _Class:
    """One of Megatron's classes, and the layer that a call of it builds."""

    def __init__(self, theirs: str, ours: str, options: Options) -> None:
        self.theirs, self.ours = resolve_name(theirs), resolve_name(ours)
        self.public, self.replaced = ours.replace(":", "."), options is not False
        self.options = dict(options) if isinstance(options, Mapping) else {}

    def check(self) -> None:
        found = vars(self.theirs).get("__new__")
        if found is not None and inspect.unwrap(found).__module__ != __name__:
            raise RuntimeError(
                f"{_path(self.theirs)}.__new__ was replaced by other code ({found!r}). "
                f"megatron_gdn would undo that, so it does nothing. Call patch_megatron() without "
                f"the other patch, or give your specs {self.public} yourself."
            )
        if self.replaced:
            given, taken = _arguments(self.theirs), _arguments(self.ours)
            known = taken.keys() - given.keys()
            if unknown := sorted(self.options.keys() - known):
                raise TypeError(
                    f"{self.public} has no option {', '.join(unknown)} here. Its options are "
                    f"{', '.join(sorted(known))}."
                )
            self._require_known_constructor(given, taken)

    def _require_known_constructor(self, given: Arguments, taken: Arguments) -> None:
        """Refuse a constructor of Megatron's with an argument, place or default that ours lacks."""
        places = [name for name, each in taken.items() if each.kind is not each.KEYWORD_ONLY]
        wrong = []
        for place, (name, argument) in enumerate(given.items()):
            mine = taken.get(name)
            if mine is None:
                wrong.append(f"{name} is not known")
            elif name in places and places.index(name) != place:
                wrong.append(f"{name} has another place")
            # Of a stage's offset the defaults None and 0 mean the same.
            elif argument.default != mine.default and not (
                {argument.default, mine.default} <= {None, 0, inspect.Parameter.empty}
            ):
                wrong.append(f"{name}={argument.default!r} is {mine.default!r} in ours")
        if wrong:
            from megatron.core import __version__

            raise TypeError(
                f"The constructor of {_path(self.theirs)} in megatron-core {__version__} is not "
                f"the one that {self.public} was written for: {'; '.join(wrong)}. Take a tested "
                f"megatron-core, or give your specs {self.public} yourself."
            )

    def install(self) -> None:
        if self.replaced:
            self.theirs.__new__ = _builder(self.theirs, self.ours, self.options)
        elif "__new__" in vars(self.theirs):
            # Not deleted: a class whose __new__ was deleted refuses every argument.
            self.theirs.__new__ = _builder(self.theirs, None, {})

    def told(self) -> str:
        theirs = f"Megatron's {self.theirs.__name__}"
        if not self.replaced:
            return f"{theirs} stays Megatron's"
        given = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        also = ""
        if _OF_MCORE_BRIDGE.endswith(self.theirs.__name__) and find_spec("mcore_bridge"):
            also = ", mcore-bridge's subclass of it too"
        return f"{theirs} is built as {self.public}({given}){also}"


def _builder(theirs: type, ours: type | None, options: dict[str, Any]) -> Callable:
    def __new__(cls, *args, **kwargs):
        built = bool(args or kwargs)  # a copy or unpickled layer is filled afterwards instead
        if ours is not None and built:
            if cls is theirs:
                return ours(*args, **{**options, **kwargs})
            if _path(cls) == _OF_MCORE_BRIDGE:
                from .mcore_bridge import build

                return build(*args, **{**options, **kwargs})
            _name_subclass(cls, theirs)
        return object.__new__(cls)

    return staticmethod(__new__)


@cache
def _name_subclass(cls: type, theirs: type) -> None:
    logger.warning(
        f"{_path(cls)} is a subclass of Megatron's {theirs.__name__} and is built as it is, not as "
        f"megatron_gdn's layer."
    )


def _arguments(cls: type) -> Arguments:
    parameters = inspect.signature(cls.__init__).parameters
    return {name: each for name, each in parameters.items() if name != "self"}


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
