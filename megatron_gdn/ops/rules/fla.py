"""fla (flash-linear-attention) as a rule: a mixer lists the functions of fla that it
calls.

The rules call the functions inside fla 0.6's autograd classes, and not the classes,
because the classes copy strided inputs and save other tensors. :func:`why_not_callable`
checks functions and arguments. The import of fla takes seconds, so fla is imported only
if a rule for a GPU is chosen.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from ..documents import Documents
from ..kernels.tiles import MOST_PROGRAMS
from ..obstacles import Obstacle, why_not_fla_package
from ..state_maps.segments import CHUNK
from ..state_maps.state_map import StateMap, StateShape
from .base import (
    Bits,
    Gradients,
    Inputs,
    Repeats,
    Rule,
    RuleBackward,
    RuleForward,
    RuleOutput,
    Saved,
    Sizes,
    in_rows,
)
from .fla_configurations import fixed_configurations
from .repeatable import Repeatable


def on_h200(*dims: tuple[int, int]) -> Repeatable:
    """fla's kernels in bf16, tested on an H200 for heads of these key and value
    dims."""
    return Repeatable(
        (9, 0),
        {"flash-linear-attention": "0.6.0", "triton": "3.6.0", "tilelang": "0.1.15"},
        (torch.bfloat16,),
        dims,
        "100 repeats and two processes were equal on an H200",
    )


SEQUENCES = "cu_seqlens chunk_indices"
# fla's arguments cu_seqlens and chunk_indices, by name
Boundaries = dict[str, Tensor | None]


def boundaries_of(documents: Documents | None) -> Boundaries:
    """fla's arguments for the boundaries of ``documents``; None: each batch row is a
    sequence."""
    if documents is None:
        return {"cu_seqlens": None, "chunk_indices": None}
    return {
        "cu_seqlens": documents.cu_seqlens,
        "chunk_indices": documents.chunks(CHUNK).indices,
    }


class ChunkProducts(NamedTuple):
    """What fla computes for all chunks before it knows the states."""

    chunks: dict[str, Tensor]  # fla's arguments for the walk from chunk to chunk
    saved: tuple[Tensor, ...]  # tensors for the backward
    scores: Tensor | None = None  # for the output: products of q and k, or q itself


def contiguous_state(state: Tensor | None) -> Tensor | None:
    """A contiguous state, since fla's kernels do not read the strides of a state."""
    if state is None:
        return None
    return state.contiguous()


class FlaForward(RuleForward):
    """The forward of one call of a rule that runs fla's functions."""

    _made: ChunkProducts | None = None

    def __init__(
        self, rule: FlaRule, inputs: Inputs, documents: Documents | None
    ) -> None:
        super().__init__(rule, inputs, documents)
        if (
            rule.reads_boundaries
            and documents is not None
            and not documents.known_on_host
        ):
            raise NotImplementedError(
                f"{type(rule).__name__} reads the documents' boundaries on the host, "
                "and those in fixed buffers are known on the device alone. Use "
                "backend='reference', or pass ordinary packed_seq_params and leave "
                "this layer out of the graph."
            )
        rows = self.inputs.v.shape[0]
        heads = self.inputs.v.shape[2]
        if rows * heads > MOST_PROGRAMS:
            raise ValueError(
                f"{rows} batch rows of {heads} heads: fla's kernels take at most "
                f"{MOST_PROGRAMS} rows times heads. Use a smaller batch, or lay the "
                "rows end to end as packed documents."
            )
        self.at = boundaries_of(documents)

    def _chunk_products(self) -> ChunkProducts:
        """The :class:`ChunkProducts` of these inputs, computed by the rule at the first
        call."""
        if self._made is None:
            made = self.rule.chunk_products(self)
        else:
            made = self._made
        self._made = made
        return made

    @torch.no_grad()
    def state_map(self) -> StateMap:
        with self.rule.configurations():
            return self.rule.state_map(self, self._chunk_products())

    @torch.no_grad()
    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        with self.rule.configurations():
            made = self._chunk_products()
            self._made = None
            states, written, last = self.rule.walk(
                self, made, contiguous_state(initial), final
            )
            o = self.rule.output(self, made, states, written)
        # The saved boundaries include chunk indices, which fla would otherwise build on
        # the host.
        return RuleOutput(in_rows(o, self.rows), last, Saved(made.saved, self.at))


class FlaBackward(RuleBackward):
    """The backward of one call of a rule that runs fla's functions."""

    @property
    def at(self) -> Boundaries:
        return self.saved.plan

    @cached_property
    def kept(self) -> tuple[Tensor, ...]:
        return self.rule.kept_for_backward(self)

    @torch.no_grad()
    def d_initial(self) -> Tensor:
        # fla computes this gradient only if initial states are passed; their values are
        # not read.
        B, _, H, V = self.d_o.shape
        if self.documents is None:
            N = B
        else:
            N = len(self.documents.cu_seqlens) - 1
        any_states = self.d_o.new_empty(
            N, H, self.inputs.k.shape[-1], V, dtype=torch.float32
        )
        with self.rule.configurations():
            return self.rule.d_states(self, any_states)

    @torch.no_grad()
    def run(
        self, initial: Tensor | None = None, d_final: Tensor | None = None
    ) -> Gradients:
        with self.rule.configurations():
            grads = self.rule.gradients(
                self, contiguous_state(initial), contiguous_state(d_final)
            )
        return grads._make(None if x is None else in_rows(x, self.rows) for x in grads)


class FlaRule(Rule):
    """A rule in fla's kernels (``backend="fla"``), for bf16 or fp16. Subclasses have
    these methods:

        chunk_products(x)                 a ChunkProducts, ``made`` below
        walk(x, made, initial, final)     states at chunks, written values, final states
                                          or None
        state_map(x, made)                a StateMap
        output(x, made, states, written)  [B, S, H, V]
        d_states(x, any_states)           the gradient of initial states, whatever their
                                          values
        gradients(x, initial, d_final)    gradients of the inputs, in a NamedTuple

    ``x`` is the forward or backward, with ``inputs``, ``documents``, and ``at``, fla's
    arguments for boundaries; a backward also has ``d_o`` and ``kept``, the result of
    :meth:`kept_for_backward`.
    """

    name = "fla"
    fits = "fla runs here"
    keeps = Bits.DETERMINISTIC
    forward = FlaForward
    backward = FlaBackward
    # where a test saw bits repeat; sizes are (key dim, value dim)
    repeatable: ClassVar[tuple[Repeatable, ...]] = ()
    reads_boundaries: ClassVar[bool] = False  # whether fla reads boundaries on the host
    # Keys are "module function", values the names of the keyword arguments. A rule calls
    # no other functions.
    called: ClassVar[Mapping[str, str]]

    def __init__(self, bits: Bits = Bits.FREE) -> None:
        """``bits``: for more than ``FREE`` each kernel has one configuration."""
        self.bits = bits

    @classmethod
    def of(cls, sizes: Sizes, bits: Bits) -> Self:
        return cls(bits)

    @cached_property
    def fla(self) -> Any:
        """fla's functions that :attr:`called` lists, each an attribute of the
        result."""
        return _functions_of(type(self))

    @classmethod
    def why_not(
        cls, device: torch.device, dtype: torch.dtype, sizes: Sizes
    ) -> Obstacle | None:
        """Why fla cannot train heads with states of ``sizes``, a StateShape, and the
        fix; None if it can."""
        if device.type != "cuda":
            return Obstacle(f"fla runs on a GPU, not on {device}")
        if dtype not in (torch.bfloat16, torch.float16):
            return Obstacle(f"fla would round {dtype} to tf32")
        why = cls.why_not_sizes(sizes)
        if why is not None:
            return Obstacle(why)
        package = why_not_fla_package(torch.cuda.get_device_capability(device)[0])
        if package is not None:
            return package
        missing = why_not_callable(cls)  # the last check, since it imports fla
        if missing is None:
            return None
        return Obstacle(missing, ImportError)

    @classmethod
    def repeats(cls, device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Repeats:
        """Whether :attr:`repeatable` covers this GPU, dtype, head dims and installed
        versions."""
        dims = (sizes.rows, sizes.columns)
        for known in cls.repeatable:
            if known.covers(device, dtype, dims):
                return Repeats(True, known.evidence)
        return Repeats(
            False,
            f"fla was not tested for repeatability with {dtype} and heads of "
            f"{dims[0]} x {dims[1]} on this GPU with the installed versions",
        )

    @classmethod
    def why_not_sizes(cls, state: StateShape) -> str | None:
        """Why the kernels cannot compute heads with states of this shape, or None."""
        if state.rows > 256:
            return f"fla takes key_head_dim up to 256, not {state.rows}"
        return None

    def configurations(self) -> AbstractContextManager[None]:
        """What fla's kernels run in: their fixed configurations if bits must repeat,
        else those that fla's timing finds fastest."""
        if self.bits:
            return fixed_configurations()
        return nullcontext()

    def kept_for_backward(self, x: FlaBackward) -> tuple[Tensor, ...]:
        """The tensors of ``x.kept``: the saved ones; a subclass may add tensors
        computed again."""
        return x.saved.tensors


def why_not_callable(rule: type[FlaRule]) -> str | None:
    """Why the installed fla's functions cannot be called with the rule's arguments, or
    None."""
    found = _functions_of(rule)
    if isinstance(found, str):
        return f"flash-linear-attention: {found}"
    return None


@cache
def _functions_of(rule: type[FlaRule]) -> SimpleNamespace | str:
    """fla's functions that the rule calls, as attributes; or why the installed fla
    lacks one."""
    functions = SimpleNamespace()
    for place, wanted in {**rule.called, "fla.ops.utils.constant RCP_LN2": ""}.items():
        home, name = place.split()
        try:
            module = import_module(home)
        except Exception as error:  # packages that fla imports may be missing or broken
            return f"{home} cannot be imported ({type(error).__name__}: {error})"
        if not hasattr(module, name):
            return f"{home} has no {name}"
        function = getattr(module, name)
        arguments = getattr(function, "arg_names", None)  # a Triton kernel has them
        if arguments is None and wanted:
            arguments = inspect.signature(function).parameters
        missing = ", ".join(sorted(set(wanted.split()).difference(arguments or ())))
        if missing:
            return f"{name} of {home} has no argument {missing}"
        setattr(functions, name, function)
    return functions
