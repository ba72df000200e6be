"""Rules that call functions of fla (flash-linear-attention); each rule lists them.

A rule does not call fla 0.6's autograd classes, which copy strided inputs and save
other tensors. It calls the functions inside these classes. :func:`why_not_callable`
checks that the installed fla has these functions with these arguments. The import of
fla takes seconds, so fla is imported only if a rule for a GPU is chosen.
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
    RepeatResult,
    Rule,
    RuleBackward,
    RuleForward,
    RuleOutput,
    SavedForBackward,
    Sizes,
    contiguous_state,
    in_rows,
)
from .fla_configurations import without_autotuning
from .repeatable import RepeatableSetup


def tested_on_h200(*dims: tuple[int, int]) -> RepeatableSetup:
    """The setup in which fla's bf16 kernels gave the same bits again on an H200;
    ``dims`` are the (key dim, value dim) of the tested heads."""
    return RepeatableSetup(
        (9, 0),
        {"flash-linear-attention": "0.6.0", "triton": "3.6.0", "tilelang": "0.1.15"},
        (torch.bfloat16,),
        dims,
        "100 repeats and two processes were equal on an H200",
    )


# the names of fla's arguments for boundaries
BOUNDARY_ARGUMENTS = "cu_seqlens chunk_indices"
# these two arguments by name; None: each batch row is a sequence
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
    """The results that fla computes inside each chunk, without the states."""

    # arguments of fla's function that passes the state from chunk to chunk
    states_arguments: dict[str, Tensor]
    saved: tuple[Tensor, ...]  # tensors for the backward
    # an argument of fla's function for the output: products of q and k, or q itself
    scores: Tensor | None = None


class FlaForward(RuleForward):
    """The forward of one call of a rule that runs fla's functions."""

    _products: ChunkProducts | None = None

    def __init__(
        self, rule: FlaRule, inputs: Inputs, documents: Documents | None
    ) -> None:
        """Refuse calls that fla's kernels cannot run, and make fla's arguments for the
        boundaries."""
        super().__init__(rule, inputs, documents)
        if (
            rule.reads_boundaries_on_host
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
        self.boundaries = boundaries_of(documents)

    def _chunk_products(self) -> ChunkProducts:
        """The :class:`ChunkProducts` of these inputs, computed at the first call."""
        products = self._products
        if products is None:
            products = self.rule.chunk_products(self)
            self._products = products
        return products

    @torch.no_grad()
    def state_map(self) -> StateMap:
        with self.rule.configuration_context():
            return self.rule.state_map(self, self._chunk_products())

    @torch.no_grad()
    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        """The output from ``initial`` states. The products of :meth:`state_map` are
        used again, then freed."""
        with self.rule.configuration_context():
            products = self._chunk_products()
            self._products = None
            states, written, last = self.rule.pass_states(
                self, products, contiguous_state(initial), final
            )
            o = self.rule.output(self, products, states, written)
        # The backward gets the boundaries with their chunk indices. Without them fla
        # would build the indices on the host.
        saved = SavedForBackward(products.saved if keep else (), self.boundaries)
        return RuleOutput(in_rows(o, self.batch_shape), last, saved)


class FlaBackward(RuleBackward):
    """The backward of one call of a rule that runs fla's functions."""

    @property
    def boundaries(self) -> Boundaries:
        return self.saved.other_values

    @cached_property
    def kept_tensors(self) -> tuple[Tensor, ...]:
        """The saved tensors, and those that the rule computes again from them."""
        return self.rule.kept_for_backward(self)

    @torch.no_grad()
    def d_initial(self) -> Tensor:
        """``[N, H, K, V]``: the gradient of the initial states if the final states have
        gradient 0."""
        # fla computes this gradient only if it gets initial states. It does not read
        # their values, so they are left uninitialised.
        B, _, H, V = self.d_o.shape
        if self.documents is None:
            N = B
        else:
            N = len(self.documents.cu_seqlens) - 1
        any_states = self.d_o.new_empty(
            N, H, self.inputs.k.shape[-1], V, dtype=torch.float32
        )
        with self.rule.configuration_context():
            return self.rule.d_states(self, any_states)

    @torch.no_grad()
    def run(
        self, initial: Tensor | None = None, d_final: Tensor | None = None
    ) -> Gradients:
        """The gradients of the inputs ``[B, S, ...]``; ``initial`` and ``d_final`` are
        ``[N, H, K, V]`` or None (zeros)."""
        with self.rule.configuration_context():
            grads = self.rule.gradients(
                self, contiguous_state(initial), contiguous_state(d_final)
            )
        return grads._make(
            None if x is None else in_rows(x, self.batch_shape) for x in grads
        )


class FlaRule(Rule):
    """A rule in fla's kernels (``backend="fla"``), for bf16 or fp16.

    Subclasses have these methods:

        chunk_products(call)                   a :class:`ChunkProducts`
        pass_states(call, products, initial, final)
                                               the states before chunks, the values that
                                               tokens write to the state, and the final
                                               states or None
        state_map(call, products)              a StateMap
        output(call, products, states, written)   [B, S, H, V]; ``written`` are the
                                               values that tokens write to the state
        d_states(call, any_states)             the gradient of the initial states;
                                               values of ``any_states`` are not read
        gradients(call, initial, d_final)      gradients of the inputs, a NamedTuple

    ``call`` is a :class:`FlaForward` or :class:`FlaBackward`. Both have ``inputs``,
    ``documents`` and ``boundaries`` (fla's arguments for the boundaries). A backward
    also has ``d_o`` and ``kept_tensors``.
    """

    name = "fla"
    why_chosen = "fla runs here"
    strongest_promise = Bits.DETERMINISTIC
    forward_class = FlaForward
    backward_class = FlaBackward
    # the setups in which a test found that bits repeat; sizes are (key dim, value dim)
    repeatable_setups: ClassVar[tuple[RepeatableSetup, ...]] = ()
    # whether fla reads the documents' boundaries on the host
    reads_boundaries_on_host: ClassVar[bool] = False
    # The functions of fla that the rule calls: a key is "module function", its value
    # the names of the keyword arguments.
    fla_functions: ClassVar[Mapping[str, str]]

    def __init__(self, bits: Bits = Bits.FREE) -> None:
        """If ``bits`` is more than ``FREE``, each kernel has one configuration."""
        self.bits = bits

    @classmethod
    def of(cls, sizes: Sizes, bits: Bits) -> Self:
        return cls(bits)

    @cached_property
    def fla(self) -> Any:
        """A namespace with the functions of fla that :attr:`fla_functions` lists."""
        return _functions_of(type(self))

    @classmethod
    def why_not(
        cls, device: torch.device, dtype: torch.dtype, sizes: Sizes
    ) -> Obstacle | None:
        """Why fla cannot train here, and the fix; None if it can.

        ``sizes`` is the :class:`StateShape` of the heads.
        """
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
    def repeats(
        cls, device: torch.device, dtype: torch.dtype, sizes: Sizes
    ) -> RepeatResult:
        """Whether :attr:`repeatable_setups` has this GPU, this dtype, these head dims
        and the installed versions; ``sizes`` is the :class:`StateShape` of the
        heads."""
        dims = (sizes.rows, sizes.columns)
        for known in cls.repeatable_setups:
            if known.covers(device, dtype, dims):
                return RepeatResult(True, known.evidence)
        return RepeatResult(
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

    def configuration_context(self) -> AbstractContextManager[None]:
        """The context in which fla's kernels run.

        If bits must repeat, the context fixes one configuration for each kernel. Else
        each kernel has the configuration that fla's timing finds fastest.
        """
        if self.bits:
            return without_autotuning()
        return nullcontext()

    def kept_for_backward(self, call: FlaBackward) -> tuple[Tensor, ...]:
        """The tensors of ``call.kept_tensors``: by default the saved tensors.

        A subclass may add tensors that it computes again.
        """
        return call.saved.tensors


def why_not_callable(rule: type[FlaRule]) -> str | None:
    """Why the rule cannot call the functions of the installed fla; None if it can."""
    functions = _functions_of(rule)
    if isinstance(functions, str):
        return f"flash-linear-attention: {functions}"
    return None


@cache
def _functions_of(rule: type[FlaRule]) -> SimpleNamespace | str:
    """fla's functions that the rule calls, as attributes of a namespace.

    If the installed fla lacks a function or an argument, the result says which.
    """
    namespace = SimpleNamespace()
    # every rule also reads this constant, 1 / ln 2
    wanted = {**rule.fla_functions, "fla.ops.utils.constant RCP_LN2": ""}
    for path, arguments in wanted.items():
        module_name, name = path.split()
        try:
            module = import_module(module_name)
        except Exception as error:  # packages that fla imports may be missing or broken
            return f"{module_name} cannot be imported ({type(error).__name__}: {error})"
        if not hasattr(module, name):
            return f"{module_name} has no {name}"
        function = getattr(module, name)
        legal = getattr(function, "arg_names", None)  # a Triton kernel has this list
        if legal is None and arguments:
            legal = inspect.signature(function).parameters
        missing = ", ".join(sorted(set(arguments.split()).difference(legal or ())))
        if missing:
            return f"{name} of {module_name} has no argument {missing}"
        setattr(namespace, name, function)
    return namespace
