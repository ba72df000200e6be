"""Replaces ``__new__`` of Megatron's recurrent layers, so that calling a class builds
our layer.

The new ``__new__`` returns our layer, so Python skips Megatron's ``__init__``.
Assigning our class to Megatron's module would not reach specs and code that have
already imported the class.
"""

from __future__ import annotations

import inspect
import logging
from argparse import ArgumentError, ArgumentParser
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

from ..compat.observe import log_single_rank

logger = logging.getLogger(__name__)

# Pairs of a class of Megatron and the class of this package that replaces it, each as
# "module:name".
_GDN_CLASSES = (
    "megatron.core.ssm.gated_delta_net:GatedDeltaNet",
    "megatron_gdn:GatedDeltaNet",
)
_GDN2_CLASSES = (
    "megatron.core.ssm.gated_delta_net:GatedDeltaNet2",
    "megatron_gdn:GatedDeltaNet2",
)
_KDA_CLASSES = (
    "megatron.core.ssm.gated_delta_net:KimiDeltaAttention",
    "megatron_gdn:KimiDeltaAttention",
)
_GDP_CLASSES = (
    "megatron.core.ssm.gated_delta_product:GatedDeltaProductMixer",
    "megatron_gdn:GatedDeltaProduct",
)
_MAMBA_CLASSES = "megatron.core.ssm.mamba_mixer:MambaMixer", "megatron_gdn:Mamba2Mixer"
# mcore-bridge's subclass of Megatron's GatedDeltaNet, which orders weights in another
# way. `.mcore_bridge` builds our layer in its place.
_MCORE_BRIDGE_CLASS = "mcore_bridge.model.modules.gated_delta_net.GatedDeltaNet"

# What a class builds: True: our layer, False: Megatron's, a mapping: our layer with
# these options.
LayerOptions = bool | Mapping[str, Any]
ConstructorArguments = dict[str, inspect.Parameter]  # a constructor's arguments by name


def patch_megatron(
    *,
    gdn: LayerOptions = True,
    mamba: LayerOptions = False,
    gdn2: LayerOptions | None = None,
    kda: LayerOptions | None = None,
    gdp: LayerOptions | None = None,
) -> None:
    """Let all later calls of Megatron's classes (``gdn``, ``mamba``, ``gdn2``, ``kda``,
    ``gdp``) build our layers.

    Specs, partials and providers made before the call build our layer too; existing
    layers do not change. ``patch_megatron(gdn=False)`` restores Megatron's layer. A
    subclass of Megatron's class is not replaced, since it may order its weights
    differently; a log line names it. Only mcore-bridge's subclass is built as our layer
    (see :mod:`.mcore_bridge`).

    Args:
        gdn: what ``megatron.core.ssm.gated_delta_net.GatedDeltaNet`` builds. True: our
            :class:`GatedDeltaNet`; False: Megatron's own; a dict: ours with these
            options, such as ``{"backend": "fla"}``. An argument in the spec overrides
            an option of the same name.
        mamba: the same for ``megatron.core.ssm.mamba_mixer.MambaMixer`` and our
            :class:`Mamba2Mixer`.
        gdn2: the same for ``GatedDeltaNet2``, if Megatron has the class; None means
            True unless ``gdn`` is False.
        kda: the same for ``KimiDeltaAttention``, the class of 'K' layers in newer
            Megatrons; None means True unless ``gdn`` is False.
        gdp: the same for ``GatedDeltaProductMixer``, the class of 'M' layers in
            ``gdp_stack_spec`` of newer Megatrons; None means True unless ``gdn`` is
            False.

    Raises:
        TypeError: an argument is neither a bool nor a dict; our layer has no such
            option; or our constructor lacks an argument of Megatron's constructor, or
            has it at another position or with another default.
        ValueError: an option has an illegal value, or ``gdn2``, ``kda`` or ``gdp`` has
            options and Megatron has no such class.
        RuntimeError: other code has replaced ``__new__`` of Megatron's class.
    """
    classes = [_PatchedClass(*_GDN_CLASSES, gdn), _PatchedClass(*_MAMBA_CLASSES, mamba)]
    by_default = gdn is not False
    # ``argument``: the argument of hybrid_stack_spec that takes a layer's options
    for name, (megatron_class_name, our_class_name), given, argument in (
        ("gdn2", _GDN2_CLASSES, gdn2, "**options"),
        ("kda", _KDA_CLASSES, kda, "kda={...}"),
        ("gdp", _GDP_CLASSES, gdp, "gdp={...}"),
    ):
        if _megatron_has(megatron_class_name):
            options = by_default if given is None else given
            classes.append(_PatchedClass(megatron_class_name, our_class_name, options))
        elif isinstance(given, Mapping) and given:
            raise ValueError(
                f"patch_megatron was given options of {name}, and this megatron-core "
                f"has no {megatron_class_name.partition(':')[2]}. Only this package's spec "
                "builds such layers: give the options to "
                f"hybrid_stack_spec({argument}), or set MEGATRON_GDN_OPTIONS."
            )
    for each in classes:  # check all classes before a class is changed
        each.check()
    for each in classes:
        each.install()
    description = "; ".join(each.describe() for each in classes)
    log_single_rank(logger, logging.WARNING, f"{description}.")


def _megatron_has(class_name: str) -> bool:
    """Whether the installed Megatron has the class ``class_name``, a text
    ``"module:name"``."""
    module, _, name = class_name.partition(":")
    return find_spec(module) is not None and hasattr(resolve_name(module), name)


# The flags of newer Megatrons about 'K' layers, with the types of their values.
_FLAGS_OF_KDA: dict[str, dict[str, Any]] = {
    "--kda-f-lora-rank": {"type": int, "help": "low rank of the forget gate"},
    "--kda-gate-lora-rank": {"type": int, "help": "low rank of the output gate"},
    "--kda-lower-bound": {"type": float, "help": "lower bound of the log-decay"},
    "--kda-safe-gate": {"action": "store_true", "help": "the gate has a bound"},
}


def add_flags_of_kda() -> None:
    """Let the parser of Megatron's scripts take the flags of newer Megatrons about 'K'
    layers."""
    from megatron.training import arguments

    add_megatrons_arguments = arguments.add_megatron_arguments
    if add_megatrons_arguments.__module__ == __name__:
        return  # this function has run before

    def add_megatron_arguments(parser: ArgumentParser) -> ArgumentParser:
        """Add Megatron's flags to ``parser``, then those of _FLAGS_OF_KDA that it
        lacks."""
        parser = add_megatrons_arguments(parser)
        group = parser.add_argument_group("Kimi Delta Attention, by megatron_gdn")
        for flag, settings in _FLAGS_OF_KDA.items():
            with suppress(ArgumentError):  # this Megatron has the flag
                group.add_argument(flag, **settings)
        return parser

    arguments.add_megatron_arguments = add_megatron_arguments


class _PatchedClass:
    """A class of Megatron and the class of this package that replaces it.

    The names of both classes are ``"module:name"``.
    """

    def __init__(
        self, megatron_class_name: str, our_class_name: str, options: LayerOptions
    ) -> None:
        """Import both classes; ``options``: an argument of :func:`patch_megatron`."""
        self.megatron_class = resolve_name(megatron_class_name)
        self.our_class = resolve_name(our_class_name)
        self.our_name = our_class_name.replace(":", ".")
        self.is_replaced = options is not False
        if not isinstance(options, bool | Mapping):
            raise TypeError(
                f"patch_megatron was given {options!r} for {self.our_name}; it takes "
                "True, False or a dict of options, such as {'backend': 'fla'}."
            )
        if isinstance(options, Mapping):
            self.options = dict(options)
        else:
            self.options = {}

    def check(self) -> None:
        """Raise if the class cannot be replaced; nothing is changed yet.

        A RuntimeError: other code has replaced ``__new__``. A TypeError or ValueError:
        our class lacks an option or an argument, or an option has an illegal value.
        """
        replacement = vars(self.megatron_class).get("__new__")
        if (
            replacement is not None
            and inspect.unwrap(replacement).__module__ != __name__
        ):
            raise RuntimeError(
                f"{_full_name(self.megatron_class)}.__new__ was replaced by other code "
                f"({replacement!r}). megatron_gdn would undo that patch, so nothing "
                "was changed. Call patch_megatron() without the other patch, or put "
                f"{self.our_name} in your specs."
            )
        if self.is_replaced:
            known = self.our_class.options_class.names()
            unknown = sorted(self.options.keys() - known)
            if unknown:
                raise TypeError(
                    f"{self.our_name} has no option {', '.join(unknown)}. Its options "
                    f"are {', '.join(sorted(known))}."
                )
            self.our_class.options_class.of(self.options)  # raises for illegal values
            self._require_known_constructor()

    def _require_known_constructor(self) -> None:
        """Raise a TypeError if our constructor lacks an argument of Megatron's, or has
        it with another position or default."""
        theirs = _constructor_arguments(self.megatron_class)
        ours = _constructor_arguments(self.our_class)
        places = [
            name
            for name, argument in ours.items()
            if argument.kind is argument.POSITIONAL_OR_KEYWORD
        ]
        wrong = []
        for place, (name, argument) in enumerate(theirs.items()):
            our_argument = ours.get(name)
            if our_argument is None:
                wrong.append(f"{name} is not known")
            elif name in places and places.index(name) != place:
                wrong.append(f"{name} has another place")
            # As a default of pp_layer_offset, None and 0 mean the same.
            elif argument.default != our_argument.default and not (
                {argument.default, our_argument.default}
                <= {None, 0, inspect.Parameter.empty}
            ):
                wrong.append(
                    f"{name}={argument.default!r} is {our_argument.default!r} in ours"
                )
        if wrong:
            from megatron.core import __version__

            raise TypeError(
                f"The constructor of {_full_name(self.megatron_class)} in "
                f"megatron-core {__version__} is not the one that {self.our_name} was written for: "
                f"{'; '.join(wrong)}. Install a tested megatron-core, or put "
                f"{self.our_name} in your specs."
            )

    def install(self) -> None:
        """Make Megatron's class build our layer, or undo an earlier patch."""
        megatron_class = self.megatron_class
        if self.is_replaced:
            megatron_class.__new__ = _make_new(
                megatron_class, self.our_class, self.options
            )
        elif "__new__" in vars(megatron_class):
            # A class whose ``__new__`` was deleted would refuse all arguments, so it
            # gets a ``__new__`` that builds Megatron's layer.
            megatron_class.__new__ = _make_new(megatron_class, None, {})

    def describe(self) -> str:
        """Say for the log which class a call of Megatron's class builds."""
        name = self.megatron_class.__name__
        if not self.is_replaced:
            return f"Megatron's {name} stays Megatron's"
        options = ", ".join(
            f"{option}={value!r}" for option, value in self.options.items()
        )
        subclass_clause = ""
        # mcore-bridge's subclass has the name of Megatron's class
        if _MCORE_BRIDGE_CLASS.endswith(name) and find_spec("mcore_bridge"):
            subclass_clause = ", mcore-bridge's subclass of it too"
        return (
            f"Megatron's {name} is built as {self.our_name}({options}){subclass_clause}"
        )


def _make_new(
    megatron_class: type, our_class: type | None, options: dict[str, object]
) -> Callable:
    """A ``__new__`` for ``megatron_class`` that builds ``our_class`` with ``options``.

    If ``our_class`` is None, it builds Megatron's layer.
    """

    def __new__(cls, *args, **kwargs):
        """Build ``our_class``; a subclass of ``megatron_class``, except mcore-bridge's,
        is built as it is."""
        # copy and pickle call __new__ without arguments, then fill the layer
        is_constructor_call = bool(args or kwargs)
        if our_class is not None and is_constructor_call:
            if cls is megatron_class:
                return our_class(*args, **{**options, **kwargs})
            if _full_name(cls) == _MCORE_BRIDGE_CLASS:
                from .mcore_bridge import build

                return build(*args, **{**options, **kwargs})
            _warn_of_subclass(cls, megatron_class)
        return object.__new__(cls)

    return staticmethod(__new__)


@cache
def _warn_of_subclass(cls: type, megatron_class: type) -> None:
    """Warn once that ``cls``, a subclass of ``megatron_class``, is not replaced."""
    logger.warning(
        f"{_full_name(cls)} is a subclass of Megatron's {megatron_class.__name__} and "
        "is built as it is, not as megatron_gdn's layer."
    )


def _constructor_arguments(cls: type) -> ConstructorArguments:
    """The arguments of ``cls.__init__`` by name, without ``self``."""
    arguments = dict(inspect.signature(cls.__init__).parameters)
    arguments.pop("self", None)
    return arguments


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
