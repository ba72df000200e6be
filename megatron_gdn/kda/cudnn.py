"""cuDNN's Hopper kernels of Kimi Delta Attention as a rule: cudnn-frontend's
``kda_hopper_cuda``.

    q, k, v, o and their gradients  bf16, as many key as value heads, K = V = 128, q and
                                    k of unit length
    g, beta and their gradients     fp32; 16-bit g gives wrong results (cudnn-frontend
                                    issue 1130)
    states                          fp32, ``[N, H, V, K]``, transposed at each call

The kernels cut a sequence into segments and run them in parallel, each from a zero
state. To come near the true state, a kernel first runs tokens before its segment. It
runs so many that at most 2^-20 of any earlier state is left (keys of length 1, beta up
to 1). If the decay is slow, it runs all earlier tokens.

cuDNN builds and stores a graph for each number of tokens and of sequences. In version
1.32.0 a graph allocates a buffer for every state that a call does not pass, so each
call passes all states.

The kernels divide by the decay of 16 tokens. If each log-decay is below about -5.5,
this decay is 0 in fp32 and the kernels return NaN. So the rule needs a gate with a
lower bound of -5 or more.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..ops.delta_rule.base import RuleGrads, RuleInputs
from ..ops.documents import Documents
from ..ops.obstacles import Obstacle, installed_version, version_tuple
from ..ops.rules.base import (
    Bits,
    Rule,
    RuleBackward,
    RuleForward,
    RuleOutput,
    SavedForBackward,
    in_one_row,
    in_rows,
)
from ..ops.state_maps.state_map import StateMap
from .sizes import KDARuleSizes

HEAD_DIM = 128
LEAST_LOG_DECAY = -5.0
_SUPPORTED_VERSION = (1, 32)
_PLAN_NAME = "kda_hopper_cuda"  # of the kernels, in cudnn-frontend


@cache
def _why_not_package() -> Obstacle | None:
    """Why the installed cudnn-frontend cannot be used, with the remedy; None if it can
    be used."""
    hint = "pip install 'nvidia-cudnn-frontend==1.32.*'"
    installed = installed_version("nvidia-cudnn-frontend")
    if find_spec("cudnn") is None or installed is None:
        return Obstacle(f"cudnn-frontend is not installed ({hint})", ImportError)
    if version_tuple(installed)[:2] != _SUPPORTED_VERSION:
        return Obstacle(
            f"cudnn-frontend {installed} is not supported ({hint})", ImportError
        )
    return None


@cache
def _cudnn_functions() -> Any:
    """cudnn-frontend's module of KDA functions, imported at the first call."""
    from cudnn.linear_attention.ops import kda  # pyright: ignore[reportMissingImports]

    return kda


class _CudnnArguments:
    """The arguments of cuDNN's calls: inputs ``[T, H, ...]`` of all batch rows end to
    end, and the offsets of the sequences.

    Raises a NotImplementedError for inputs that cuDNN does not take.
    """

    def __init__(self, inputs: RuleInputs, documents: Documents | None) -> None:
        """Check ``inputs``, lay their batch rows end to end, and make the offsets."""
        if documents is not None and not documents.known_on_host:
            raise NotImplementedError(
                "backend='cudnn' does not take documents in fixed buffers, whose "
                "boundaries change on the device. Use backend='fla' or 'auto'."
            )
        if inputs.k.shape[2] != inputs.v.shape[2]:
            raise NotImplementedError(
                "backend='cudnn' takes as many key heads as value heads, not "
                f"{inputs.k.shape[2]} and {inputs.v.shape[2]} on a rank. Use "
                "backend='fla' or 'auto'."
            )
        if inputs.g.element_size() == 2:
            raise NotImplementedError(
                f"backend='cudnn' takes log-decays g in fp32, not {inputs.g.dtype}: "
                "cuDNN computes a wrong output from 16-bit g on Hopper. Give "
                "g.float(), or use backend='fla'."
            )
        self.batch_shape = inputs.v.shape[:2]  # (B, S)
        B, S = self.batch_shape
        device = inputs.v.device
        if documents is None:
            self.offsets = torch.arange(
                0, B * S + 1, S, dtype=torch.int32, device=device
            )
        else:
            self.offsets = documents.cu_seqlens
        self.heads = inputs.v.shape[2]
        self.scale = inputs.k.shape[-1] ** -0.5
        # [T, H, ...] each, in the order of cuDNN's arguments
        self.token_inputs = RuleInputs._make(
            x[0].contiguous() for x in in_one_row(inputs)
        )

    def transposed_states(self, states: Tensor | None = None) -> Tensor:
        """The states ``[..., K, V]`` as cuDNN takes them: ``[N, H, V, K]`` of all
        sequences and heads, in g's dtype; zeros for None."""
        shape = len(self.offsets) - 1, self.heads, HEAD_DIM, HEAD_DIM
        if states is None:
            return self.token_inputs.g.new_zeros(shape)
        return states.to(self.token_inputs.g.dtype).mT.expand(shape).contiguous()


class CudnnForward(RuleForward):
    """The forward of :class:`CudnnKDA` for one micro-batch."""

    def __init__(
        self, rule: Rule, inputs: RuleInputs, documents: Documents | None
    ) -> None:
        """Make the arguments of cuDNN's calls; they depend only on ``inputs`` and
        ``documents``.

        The base's ``__init__`` is not called: it would store ``inputs``, which no
        method here reads. So ``inputs`` can be freed once they are copied to the
        arguments.
        """
        self._arguments = _CudnnArguments(inputs, documents)

    def _run(self, v: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        """The output ``[T, H, V]`` and the final states ``[N, H, K, V]``, computed for
        the values ``v``; ``initial``: the initial states, transposed."""
        arguments = self._arguments
        tokens = arguments.token_inputs
        o, last, _ = _cudnn_functions().kda_fwd(
            tokens.q,
            tokens.k,
            v,
            tokens.g,
            tokens.beta,
            arguments.offsets,
            arguments.scale,
            initial_state=initial,
            output_final_state=True,
            plan_name=_PLAN_NAME,
        )
        return o, last.mT.contiguous()

    @torch.no_grad()
    def state_map(self) -> StateMap:
        """``local`` is the final state if the initial state is zero. ``through`` is the
        final state if the initial state is the unit matrix and all values are zero."""
        v = self._arguments.token_inputs.v
        zeros = self._arguments.transposed_states()
        _, local = self._run(v, zeros)
        unit = self._arguments.transposed_states(
            torch.eye(HEAD_DIM, dtype=torch.float32, device=v.device)
        )
        _, through = self._run(torch.zeros_like(v), unit)
        return StateMap(local, through)

    @torch.no_grad()
    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        """The output ``[B, S, H, V]`` and, with ``final``, the final states. ``keep`` is
        not read: the backward needs no saved tensors."""
        arguments = self._arguments
        o, last = self._run(
            arguments.token_inputs.v, arguments.transposed_states(initial)
        )
        o = in_rows(o[None], arguments.batch_shape)
        return RuleOutput(o, last if final else None, SavedForBackward())


class CudnnBackward(RuleBackward):
    """The backward of :class:`CudnnKDA` for one micro-batch."""

    def __init__(
        self,
        rule: Rule,
        d_o: Tensor,
        inputs: RuleInputs,
        saved: SavedForBackward,
        documents: Documents | None,
    ) -> None:
        """Make the arguments of cuDNN's calls from ``inputs`` and ``d_o [B, S, H, V]``;
        ``saved`` is empty. The base's ``__init__`` is not called, as in
        :class:`CudnnForward`."""
        self._arguments = _CudnnArguments(inputs, documents)
        self._d_o = in_one_row(d_o)[0].contiguous()

    def _run(
        self, initial: Tensor | None, d_final: Tensor | None
    ) -> tuple[Tensor, ...]:
        """The gradients of q, k, v, g and beta, ``[T, H, ...]``, then the gradient of
        the initial states, transposed."""
        arguments = self._arguments
        return _cudnn_functions().kda_bwd(
            self._d_o,
            *arguments.token_inputs,
            arguments.offsets,
            arguments.scale,
            initial_state=arguments.transposed_states(initial),
            d_final_state=arguments.transposed_states(d_final),
            plan_name=_PLAN_NAME,
        )

    @torch.no_grad()
    def d_initial(self) -> Tensor:
        """``[N, H, K, V]``: the gradient of the initial states, with zero gradients of
        the final states."""
        # The output is linear in the initial states, so their gradient does not depend
        # on them. kda_bwd gives it after the gradients of the five inputs.
        gradients = self._run(initial=None, d_final=None)
        return gradients[5].mT.contiguous()

    @torch.no_grad()
    def run(
        self, initial: Tensor | None = None, d_final: Tensor | None = None
    ) -> RuleGrads:
        """The gradients of the inputs; ``initial`` and ``d_final`` are ``[N, H, K, V]``
        or None (zeros)."""
        of_inputs = self._run(initial, d_final)[:5]
        batch_shape = self._arguments.batch_shape
        return RuleGrads(*(in_rows(x[None], batch_shape) for x in of_inputs))


class CudnnKDA(Rule):
    """The rule ``backend="cudnn"``: KDA by cuDNN's kernels; ``"auto"`` never takes
    it."""

    name = "cudnn"
    only_by_name = True
    strongest_promise = Bits.FREE
    why_bits_vary = "cuDNN cuts a sequence into pieces by the number of all sequences"
    backward_reads = frozenset(RuleInputs._fields)
    forward_class = CudnnForward
    backward_class = CudnnBackward

    @classmethod
    def why_not(
        cls, device: torch.device, dtype: torch.dtype, sizes: KDARuleSizes
    ) -> Obstacle | None:
        """Why cuDNN cannot train heads of these sizes, with the remedy; None if it
        can."""
        if device.type != "cuda":
            return Obstacle(f"cuDNN runs on a GPU, not on {device}")
        if dtype != torch.bfloat16:
            return Obstacle(f"cuDNN's KDA takes bf16, not {dtype}")
        for dim in (sizes.state_shape.rows, sizes.state_shape.columns):
            if dim != HEAD_DIM:
                return Obstacle(f"cuDNN's KDA takes heads of {HEAD_DIM}, not {dim}")
        bound = sizes.lower_bound
        if bound is None or bound < LEAST_LOG_DECAY:
            return Obstacle(
                "cuDNN's KDA returns NaN for log-decays below -5.5, and "
                f"gate_lower_bound={bound}. A layer with "
                f"gate_lower_bound={LEAST_LOG_DECAY} or more can take it"
            )
        if torch.cuda.get_device_capability(device) != (9, 0):
            return Obstacle("cuDNN's KDA runs on compute capability 9.0 only")
        return _why_not_package()
