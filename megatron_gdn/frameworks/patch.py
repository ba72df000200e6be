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

# (Megatron's class, our class)
_GDN = "megatron.core.ssm.gated_delta_net:GatedDeltaNet", "megatron_gdn:GatedDeltaNet"
_GDN2 = (
    "megatron.core.ssm.gated_delta_net:GatedDeltaNet2",
    "megatron_gdn:GatedDeltaNet2",
)
_KDA = (
    "megatron.core.ssm.gated_delta_net:KimiDeltaAttention",
    "megatron_gdn:KimiDeltaAttention",
)
_GDP = (
    "megatron.core.ssm.gated_delta_product:GatedDeltaProductMixer",
    "megatron_gdn:GatedDeltaProduct",
)
_MAMBA = "megatron.core.ssm.mamba_mixer:MambaMixer", "megatron_gdn:Mamba2Mixer"
# A subclass that orders weights in another way; `.mcore_bridge` builds our layer in its
# place.
_MCORE_BRIDGE_CLASS = "mcore_bridge.model.modules.gated_delta_net.GatedDeltaNet"

Options = bool | Mapping[str, Any]
Arguments = dict[str, inspect.Parameter]


def patch_megatron(
    *,
    gdn: Options = True,
    mamba: Options = False,
    gdn2: Options | None = None,
    kda: Options | None = None,
    gdp: Options | None = None,
) -> None:
    """Let all later calls of Megatron's classes (``gdn``, ``mamba``, ``gdn2``, ``kda``,
    ``gdp``) build our layers.

    Specs, partials and providers made before the call build our layer too; existing
    layers do not change. ``patch_megatron(gdn=False)`` restores Megatron's layer. A
    subclass of Megatron's class may order its weights differently, so it is not
    replaced, and a log line names it; only mcore-bridge's subclass is built as our
    layer (see :mod:`.mcore_bridge`).

    Args:
        gdn: what ``megatron.core.ssm.gated_delta_net.GatedDeltaNet`` builds. True: our
            :class:`GatedDeltaNet`; False: Megatron's own; a dict: ours with these
            options, such as ``{"backend": "fla"}``. An argument in the spec overrides
            an option of the same name.
        mamba: the same for ``megatron.core.ssm.mamba_mixer.MambaMixer`` and our
            :class:`Mamba2Mixer`.
        gdn2: the same for ``GatedDeltaNet2``, if Megatron has the class; None means
            True unless ``gdn`` is False.
        kda: the same for ``KimiDeltaAttention``, of which newer Megatrons build 'K'
            layers; None means True unless ``gdn`` is False.
        gdp: the same for ``GatedDeltaProductMixer``, of which newer Megatrons build 'M'
            layers of ``gdp_stack_spec``; None means True unless ``gdn`` is False.

    Raises:
        TypeError: an argument is neither a bool nor a dict; our layer does not know an
            option; or an argument of Megatron's constructor is absent in our
            constructor, or has another default or position there.
        ValueError: an option has an illegal value, or ``kda`` or ``gdp`` has options
            and Megatron has no such class.
        RuntimeError: other code has replaced ``__new__`` of Megatron's class.
    """
    classes = [_PatchedClass(*_GDN, gdn), _PatchedClass(*_MAMBA, mamba)]
    by_default = gdn is not False
    if has_gdn2():
        classes.insert(1, _PatchedClass(*_GDN2, by_default if gdn2 is None else gdn2))
    for name, theirs, given in (("kda", _KDA, kda), ("gdp", _GDP, gdp)):
        if _megatron_has(theirs[0]):
            classes.append(
                _PatchedClass(*theirs, by_default if given is None else given)
            )
        elif isinstance(given, Mapping) and given:
            raise ValueError(
                f"patch_megatron was given options of {name}, and this megatron-core "
                f"has no {theirs[0].partition(':')[2]}. Only this package's spec "
                "builds such layers: give the options to "
                f"hybrid_stack_spec({name}={{...}}), or set MEGATRON_GDN_OPTIONS."
            )
    for each in classes:  # check all classes before a class is changed
        each.check()
    for each in classes:
        each.install()
    description = "; ".join(each.describe() for each in classes)
    log_single_rank(logger, logging.WARNING, f"{description}.")


def has_gdn2() -> bool:
    """Whether the installed Megatron has Gated DeltaNet-2 (main branch has it, 0.19 has
    not)."""
    return _megatron_has(_GDN2[0])


def has_kda() -> bool:
    """Whether the installed Megatron has a class of Kimi Delta Attention (pull request
    6556 has it, 0.19 has not)."""
    return _megatron_has(_KDA[0])


def _megatron_has(path: str) -> bool:
    """Whether the installed Megatron has the class ``path``, ``"module:name"``."""
    module, _, name = path.partition(":")
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

    add_theirs = arguments.add_megatron_arguments
    if add_theirs.__module__ == __name__:
        return

    def add_megatron_arguments(parser: ArgumentParser) -> ArgumentParser:
        parser = add_theirs(parser)
        group = parser.add_argument_group("Kimi Delta Attention, by megatron_gdn")
        for flag, how in _FLAGS_OF_KDA.items():
            with suppress(ArgumentError):  # this Megatron has the flag
                group.add_argument(flag, **how)
        return parser

    arguments.add_megatron_arguments = add_megatron_arguments


class _PatchedClass:
    """A class of Megatron and the class of this package that replaces it."""

    def __init__(self, theirs: str, our_class: str, options: Options) -> None:
        self.theirs, self.ours = resolve_name(theirs), resolve_name(our_class)
        self.public = our_class.replace(":", ".")
        self.replaced = options is not False
        if not isinstance(options, bool | Mapping):
            raise TypeError(
                f"patch_megatron was given {options!r} for {self.public}; it takes "
                "True, False or a dict of options, such as {'backend': 'fla'}."
            )
        if isinstance(options, Mapping):
            self.options = dict(options)
        else:
            self.options = {}

    def check(self) -> None:
        """Raise if other code replaced ``__new__``, or our class lacks an option or
        argument."""
        replacement = vars(self.theirs).get("__new__")
        if (
            replacement is not None
            and inspect.unwrap(replacement).__module__ != __name__
        ):
            raise RuntimeError(
                f"{_full_name(self.theirs)}.__new__ was replaced by other code "
                f"({replacement!r}). megatron_gdn would undo that patch, so nothing "
                "was changed. Call patch_megatron() without the other patch, or put "
                f"{self.public} in your specs."
            )
        if self.replaced:
            theirs = _constructor_arguments(self.theirs)
            ours = _constructor_arguments(self.ours)
            known = self.ours.options_class.names()
            if unknown := sorted(self.options.keys() - known):
                raise TypeError(
                    f"{self.public} has no option {', '.join(unknown)}. Its options "
                    f"are {', '.join(sorted(known))}."
                )
            self.ours.options_class.of(self.options)  # raises for an illegal value
            self._require_known_constructor(theirs, ours)

    def _require_known_constructor(self, theirs: Arguments, ours: Arguments) -> None:
        """Raise if our constructor (``ours``) lacks or changes an argument of
        Megatron's."""
        places = [
            name
            for name, each in ours.items()
            if each.kind is each.POSITIONAL_OR_KEYWORD
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
                f"The constructor of {_full_name(self.theirs)} in megatron-core "
                f"{__version__} is not the one that {self.public} was written for: "
                f"{'; '.join(wrong)}. Install a tested megatron-core, or put "
                f"{self.public} in your specs."
            )

    def install(self) -> None:
        """Make Megatron's class build our layer, or undo an earlier patch."""
        if self.replaced:
            self.theirs.__new__ = _make_new(self.theirs, self.ours, self.options)
        elif "__new__" in vars(self.theirs):
            # Without ``__new__`` the class refuses all arguments, so it gets a plain
            # ``__new__``.
            self.theirs.__new__ = _make_new(self.theirs, None, {})

    def describe(self) -> str:
        """Say for the log which class a call of Megatron's class builds."""
        theirs = f"Megatron's {self.theirs.__name__}"
        if not self.replaced:
            return f"{theirs} stays Megatron's"
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        subclass_clause = ""
        if _MCORE_BRIDGE_CLASS.endswith(self.theirs.__name__) and find_spec(
            "mcore_bridge"
        ):
            subclass_clause = ", mcore-bridge's subclass of it too"
        return f"{theirs} is built as {self.public}({options}){subclass_clause}"


def _make_new(
    theirs: type, our_class: type | None, options: dict[str, object]
) -> Callable:
    """Make a ``__new__`` of ``theirs`` that builds ``our_class``; None: it builds
    ``theirs``."""

    def __new__(cls, *args, **kwargs):
        # copy and pickle call __new__ alone, then fill the layer
        built = bool(args or kwargs)
        if our_class is not None and built:
            if cls is theirs:
                return our_class(*args, **{**options, **kwargs})
            if _full_name(cls) == _MCORE_BRIDGE_CLASS:
                from .mcore_bridge import build

                return build(*args, **{**options, **kwargs})
            _warn_of_subclass(cls, theirs)
        return object.__new__(cls)

    return staticmethod(__new__)


@cache
def _warn_of_subclass(cls: type, theirs: type) -> None:
    logger.warning(
        f"{_full_name(cls)} is a subclass of Megatron's {theirs.__name__} and is built "
        "as it is, not as megatron_gdn's layer."
    )


def _constructor_arguments(cls: type) -> Arguments:
    """The arguments of ``cls.__init__`` by name, without ``self``."""
    parameters = inspect.signature(cls.__init__).parameters
    return {name: each for name, each in parameters.items() if name != "self"}


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
