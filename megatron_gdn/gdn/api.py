"""The gated delta rule as a function of tensors, with the backends that the layers
have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.autograd import first_derivative_only, output_without_tokens, uncompiled
from ..ops.delta_rule.base import HeadSizes, RuleGrads, RuleInputs, check_rule_inputs
from ..ops.delta_rule.plain import PlainRule
from ..ops.documents import Documents
from ..ops.elementwise import l2norm
from ..ops.rules.base import Bits, Rule, SavedForBackward, contiguous_state
from ..ops.rules.token_rule import recurrence
from ..ops.state_maps.state_map import StateMap
from .rule import RULES, resolve_rule


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | Sequence[int] | Documents | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule. Per value head, with state ``S [K, V]`` in fp32:

        S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - (exp(g_t) S_{t-1})^T k_t)^T
        o_t = scale * S_t^T q_t

    (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024.) Only the backend
    ``"recurrent"`` has second derivatives; the others refuse a backward with
    ``create_graph=True``.

    Args:
        query, key: ``[B, T, G, K]``, any float dtype; value head h uses key head
            ``h // (H // G)``.
        value: ``[B, T, H, V]``.
        g: ``[B, T, H]``, natural logarithm of the decay, <= 0, fp32.
        beta: ``[B, T, H]``, write strength in (0, 1); with values in (0, 2) the factor
            ``I - beta k k^T`` of the state may have negative eigenvalues.
        scale: defaults to ``1 / sqrt(K)``.
        initial_state: ``[N, H, K, V]``; zeros when None. N is B, or the number of
            documents.
        output_final_state: also return the state after the last token of every
            sequence.
        use_qk_l2norm_in_kernel: scale query and key to unit length first (eps 1e-6).
        cu_seqlens: cumulative lengths ``[N + 1]`` of documents packed into one row (B
            must be 1), or a :class:`~megatron_gdn.ops.Documents`. Every document starts
            from its own initial state, or from zero.
        chunk_size: tokens per chunk; changes only the rounding. Kernels refuse any but
            64.
        backend: ``"recurrent"``, which computes one token at a time, or
            ``"flash_qla"``, ``"fla"``, ``"reference"`` or ``"auto"``, see
            :func:`.rule.resolve_rule`. If torch's deterministic algorithms are on, the
            rule is chosen for equal bits in every run.

    Returns:
        ``o``, ``[B, T, H, V]`` in ``value.dtype``, and the final state ``[N, H, K, V]``
        in fp32 (fp64 for fp64 input), or None.

    Raises:
        ValueError: shapes that do not fit, offsets that do not cover the tokens, an
            unknown backend, a chunk size that a kernel refuses.
        ImportError: the backend's package is missing.
    """
    names = [rule.name for rule in RULES]
    if backend not in ["auto", "recurrent"] + names:
        raise ValueError(
            f"unknown backend {backend!r}; use 'auto', 'recurrent' or one of "
            f"{', '.join(map(repr, names))}."
        )
    common = {
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "scale": scale,
    }
    documents = check_rule_inputs(query, key, value, g, beta, initial_state, cu_seqlens)
    inputs = RuleInputs(query, key, value, g, beta)
    if backend == "recurrent":
        return recurrent_gated_delta_rule(
            query, key, value, g, beta, cu_seqlens=documents, **common
        )
    deterministic = torch.are_deterministic_algorithms_enabled()
    rule = resolve_rule(
        backend,
        device=value.device,
        dtype=value.dtype,
        sizes=HeadSizes(key.shape[2], value.shape[2], key.shape[3], value.shape[3]),
        bits=Bits.DETERMINISTIC if deterministic else Bits.FREE,
        operands="bf16",  # fp16 operands are made by a layer's front
    ).rule
    if rule.name == "reference":
        return torch_chunk_gated_delta_rule(
            query,
            key,
            value,
            g,
            beta,
            chunk_size,
            cu_seqlens=documents,
            **common,
        )
    if chunk_size != 64:
        raise ValueError(
            f"chunk_size={chunk_size}: the kernels of backend {rule.name!r} have "
            "chunks of 64 tokens. Leave it at 64, or use backend='reference'."
        )
    return run_rule(rule, inputs, documents, **common)


@uncompiled  # torch.compile cannot trace run_rule and the checks of the inputs
def torch_chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | Sequence[int] | Documents | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule in chunks, in plain torch, deterministic, on any device.

    The function computes in fp32 (fp64 for fp64 input). The backward runs the forward
    again, so autograd saves only the inputs. A second derivative is refused.

    Arguments, result and errors are those of :func:`megatron_gdn.ops.gated_delta_rule`.
    ``chunk_size``, the number of tokens per chunk, changes only rounding, speed and
    memory.
    """
    documents = check_rule_inputs(query, key, value, g, beta, initial_state, cu_seqlens)
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be at least 1; 64 is usual.")
    return run_rule(
        PlainRule(chunk_size=chunk_size, scale=scale),
        RuleInputs(query, key, value, g, beta),
        documents,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )


def recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | Sequence[int] | Documents | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule, one token at a time, in fp32 (fp64 if ``value`` is fp64),
    for tests.

    Arguments, result and errors are those of :func:`megatron_gdn.ops.gated_delta_rule`.
    """
    documents = check_rule_inputs(query, key, value, g, beta, initial_state, cu_seqlens)
    if not value.numel():
        inputs = RuleInputs(query, key, value, g, beta)
        return _result_without_tokens(
            inputs, documents, initial_state, output_final_state
        )
    if use_qk_l2norm_in_kernel:
        query = l2norm(query)
        key = l2norm(key)
    wide = torch.promote_types(value.dtype, torch.float32)
    q, k, v, g, beta = (x.to(wide) for x in (query, key, value, g, beta))
    q = q * (key.shape[-1] ** -0.5 if scale is None else scale)
    if documents is None:
        offsets = None
    else:
        offsets = documents.offsets
    o, final = recurrence(q, k, v, g, beta, initial_state, offsets)
    return o.to(value.dtype), final if output_final_state else None


# Dynamo's guards fail in run_rule; kernels and cached tables gain nothing from tracing
@uncompiled
def run_rule(
    rule: Rule,
    inputs: RuleInputs,
    documents: Documents | None,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The result of :func:`gated_delta_rule` for ``inputs`` and ``documents``, computed
    by ``rule``; the keywords are arguments of that function."""
    q, k, v, g, beta = inputs
    if not v.numel():  # a rule's backward needs a token
        return _result_without_tokens(
            inputs, documents, initial_state, output_final_state
        )
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    if scale is not None:
        # a rule itself multiplies by 1 / sqrt(K)
        q = q * (scale * k.shape[-1] ** 0.5)
    # A rule gets the states of non-empty documents only; an empty document's state
    # stays as it was.
    if documents is None:
        filled = None
    else:
        filled = documents.filled_indices
    initial = initial_state
    if filled is not None and initial is not None:
        initial = initial.index_select(0, filled)
    o, final = _RunRule.apply(
        rule, documents, output_final_state, q, k, v, g, beta, initial
    )
    if final is None or documents is None or filled is None:
        return o, final
    final_states = final.new_zeros((len(documents.lengths),) + final.shape[1:])
    if initial_state is not None:
        final_states = initial_state.to(final.dtype)
    return o, final_states.index_copy(0, filled, final)


def _result_without_tokens(
    inputs: RuleInputs,
    documents: Documents | None,
    initial_state: Tensor | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """The result of :func:`gated_delta_rule` for ``inputs`` without a token: an empty
    output, and states that stay as they were. Every input gets a gradient."""
    q, k, v, g, beta = inputs
    B, _, H, V = v.shape
    empty = output_without_tokens(
        v.flatten(2), q, k, g, beta, initial_state, width=H * V
    )
    o = empty.unflatten(2, (H, V))
    if not output_final_state:
        return o, None
    dtype = torch.promote_types(v.dtype, torch.float32)
    if initial_state is not None:
        return o, initial_state.to(dtype)
    sequences = B if documents is None else len(documents.lengths)
    return o, v.new_zeros(sequences, H, k.shape[-1], V, dtype=dtype)


class _RunRule(torch.autograd.Function):
    """The autograd function of a rule: runs the rule's forward and the rule's own
    backward."""

    @staticmethod
    def forward(
        ctx, rule: Rule, documents, with_final: bool, q, k, v, g, beta, initial
    ):
        """The output ``[B, S, H, V]``, and the final states if ``with_final``;
        ``initial`` may be None (zeros).

        Only :class:`PlainRule` takes inputs and states that are not contiguous. For
        other rules they are copied, as is ``d_final`` in the backward.
        """
        ctx.dtypes = [x.dtype for x in (q, k, v, g, beta)]
        g, beta = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (g, beta))
        inputs = RuleInputs(q, k, v, g, beta)
        if not isinstance(rule, PlainRule):
            inputs = RuleInputs._make(x.contiguous() for x in inputs)
            initial = contiguous_state(initial)
        o, final, saved = rule.begin(inputs, documents).run(initial, final=with_final)
        ctx.save_for_backward(*inputs, initial, *saved.tensors)
        ctx.rule = rule
        ctx.documents = documents
        ctx.other_values = saved.other_values
        return o, final

    @staticmethod
    @first_derivative_only
    def backward(ctx, d_o: Tensor, d_final: Tensor | None):
        """The gradients of q, k, v, g and beta, in the dtypes of these inputs, then
        that of the initial states. The last one is None if it is not needed.

        ``d_o`` is ``[B, S, H, V]``, ``d_final`` is ``[N, H, K, V]`` (None: zeros).

        The forward's state maps are computed only if the initial states need a
        gradient.
        """
        # Under activation checkpointing, ctx.saved_tensors may be read only once.
        q, k, v, g, beta, initial, *kept = ctx.saved_tensors
        inputs = RuleInputs(q, k, v, g, beta)
        saved = SavedForBackward(tuple(kept), ctx.other_values)
        if not isinstance(ctx.rule, PlainRule):
            d_final = contiguous_state(d_final)
        # as in a layer: None in place of each input that the rule's backward does not
        # read
        unread = set(RuleInputs._fields) - ctx.rule.backward_reads
        read_inputs = inputs._replace(**dict.fromkeys(unread))
        rule_backward = ctx.rule.begin_backward(
            d_o.contiguous(), read_inputs, saved, ctx.documents
        )
        initial_needs_gradient = ctx.needs_input_grad[8]  # the last argument of forward
        if initial_needs_gradient:

            def state_map() -> StateMap:
                return ctx.rule.begin(inputs, ctx.documents).state_map()

            grads, d_initial = rule_backward.run_with_d_initial(
                initial, d_final, state_map
            )
        else:
            grads = rule_backward.run(initial, d_final)
            d_initial = None
        grads = gradients_of_key_heads(grads, inputs.k.shape[2])
        grads = (x.to(dtype) for x, dtype in zip(grads, ctx.dtypes, strict=True))
        return None, None, None, *grads, d_initial


def gradients_of_key_heads(grads: RuleGrads, key_heads: int) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, g and beta, times ``grads.factor`` (``[H]``, or None).
    If dq and dk have H heads, they are summed to ``key_heads`` heads."""
    dq, dk, dv, dg, dbeta, factor = grads
    dq = _sum_to_key_heads(dq, key_heads)
    dk = _sum_to_key_heads(dk, key_heads)
    if factor is not None:
        # value heads that share a key head have equal factors
        factor_of_key_head = factor.view(key_heads, -1)[:, 0]
        dq, dk = (x * factor_of_key_head[:, None] for x in (dq, dk))
        dv = dv * factor[:, None]
        dg = dg * factor
        dbeta = dbeta * factor
    return dq, dk, dv, dg, dbeta


def _sum_to_key_heads(gradient: Tensor, key_heads: int) -> Tensor:
    """Sum ``gradient [B, S, H, K]`` over the value heads of each key head, in fp32 or
    wider; unchanged if H is the number of key heads."""
    if gradient.shape[2] == key_heads:
        return gradient
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return gradient.unflatten(2, (key_heads, -1)).sum(3, dtype=wide)
