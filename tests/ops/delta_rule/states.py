"""Sequences run in segments, states and their gradients carried by hand; shared by the
tests."""

import torch
from torch import Tensor

from megatron_gdn.gdn.api import torch_chunk_gated_delta_rule
from megatron_gdn.gdn.rule import RuleInputs
from megatron_gdn.ops.delta_rule.plain import PlainBackward, PlainRule
from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.rules.base import Bits, RuleBackward, SavedForBackward
from megatron_gdn.ops.state_maps.segments import Segments, cut_at
from megatron_gdn.ops.static_documents import StaticDocuments

NAMES = ("o", "q", "k", "v", "g", "beta")


def of_filled(x: Tensor, documents: Documents) -> Tensor:
    """Zero for empty documents in fixed buffers, whose states kernels do not write."""
    if not isinstance(documents, StaticDocuments):
        return x
    return torch.where((documents.cu_seqlens.diff() > 0).view(-1, 1, 1, 1), x, 0.0)


def documents_of(lengths, device="cpu") -> Documents | None:
    """None of None: rows without documents."""
    if lengths is None:
        return None
    offsets = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return Documents.from_cu_seqlens(offsets, offsets[-1], device=device)


def random_inputs(
    S: int, B: int = 1, heads=(2, 4), K=3, V=5
) -> tuple[RuleInputs, Tensor]:
    """In fp64, and the gradient of their output."""
    make = torch.Generator().manual_seed(3)
    G, H = heads

    def normal(*shape):
        return torch.randn(B, S, *shape, generator=make, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(normal(G, K), dim=-1) for _ in range(2))
    inputs = RuleInputs(
        q, k, normal(H, V), -normal(H).abs() * 0.05, normal(H).sigmoid()
    )
    return inputs, normal(H, V)


def segments_at(sequences, offsets, device="cpu") -> Segments:
    """Of sequences and parts that begin at these tokens."""
    documents = Documents(tuple(sequences), torch.device(device))
    return Segments.of(documents, cut_at, tuple(offsets))


class InHalf(PlainRule):
    """A rule for fp16 operands: the plain one, which refuses what it should not be
    given."""

    bits = Bits.FREE

    def begin(self, inputs, documents):
        assert {x.dtype for x in inputs[:3]} == {torch.float16}
        return super().begin(inputs, documents)

    def begin_backward(self, d_o, inputs, saved, documents):
        assert {x.dtype for x in (d_o, *inputs[:3])} == {torch.float16}
        return InHalfBackward(self, d_o, inputs, saved, documents)


class InHalfBackward(PlainBackward):
    def __init__(self, rule, d_o, inputs, saved, documents):
        super().__init__(rule, d_o, inputs, saved, documents)
        self.computed = self.d_o.float()  # as gradients of states, which kernels keep

    def scale_with_d_o(self, factor):
        assert torch.equal(factor.log2(), factor.log2().round())
        self.computed = self.computed * factor[..., 0]

    def run(self, initial=None, d_final=None):
        d_o = self.d_o
        assert d_o.dtype == torch.float16
        # what was scaled in place may have become subnormal, and was rounded then
        torch.testing.assert_close(
            self.computed, d_o.float(), rtol=0, atol=2.0**-25, equal_nan=True
        )
        # Powers of two in, powers of two out: what a rule may do with d_o is bounded
        # above.
        assert not d_o.isfinite().all() or d_o.abs().max() <= 1
        assert (
            d_final is None
            or not d_final.isfinite().all()
            or d_final.abs().max() <= 2**5
        )
        return super().run(initial, d_final)


class Oracle:
    """The chunk rule of plain torch over batch rows, or over documents in the one
    row."""

    def __init__(self, inputs: RuleInputs, lengths) -> None:
        self.inputs, self.offsets = (
            inputs,
            torch.tensor([0, *lengths]).cumsum(0).tolist(),
        )
        if inputs.k.shape[0] > 1:
            self.offsets = None

    def zeros(self) -> Tensor:
        k, v = self.inputs.k, self.inputs.v
        count = k.shape[0] if self.offsets is None else len(self.offsets) - 1
        wide = torch.promote_types(v.dtype, torch.float32)
        return v.new_zeros(count, v.shape[2], k.shape[-1], v.shape[-1], dtype=wide)

    def _run(self, inputs, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        return torch_chunk_gated_delta_rule(
            *inputs,
            initial_state=initial,
            output_final_state=True,
            cu_seqlens=self.offsets,
        )

    def forward(self, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._run(self.inputs, initial)

    def backward(self, d_o, initial=None, d_final=None) -> tuple[list[Tensor], Tensor]:
        zeros = self.zeros()
        initial = zeros if initial is None else initial.to(zeros.dtype)
        d_final = zeros if d_final is None else d_final.to(zeros.dtype)
        leaves = [x.detach().requires_grad_() for x in (*self.inputs, initial)]
        with torch.enable_grad():
            outputs = self._run(leaves[:-1], leaves[-1])
        *grads, d_initial = torch.autograd.grad(outputs, leaves, (d_o, d_final))
        return grads, d_initial

    def through(self) -> Tensor:
        """``[N, H, K, K]``: with v = 0 the final state is linear in the initial one."""
        v, K = self.inputs.v, self.inputs.k.shape[-1]
        silent = Oracle(self.inputs._replace(v=v.new_zeros(*v.shape[:3], K)), ())
        silent.offsets = self.offsets
        zeros = silent.zeros()
        return silent.forward(
            zeros + torch.eye(K, dtype=zeros.dtype, device=zeros.device)
        )[1]


def by_key_head(grads, groups: int) -> list[Tensor]:
    """dq and dk summed over the value heads of a key head, a factor taken out."""
    dq, dk, dv, dg, dbeta = grads[:5]
    summed = []
    for grad in (dq, dk):
        wide = torch.promote_types(grad.dtype, torch.float32)
        summed.append(grad.unflatten(2, (groups, -1)).sum(3, dtype=wide))
    factor = getattr(grads, "factor", None)
    if factor is None:
        return [*summed, dv, dg, dbeta]
    of_key_head = factor.view(groups, -1)[:, :1]
    return [
        *(x * of_key_head for x in summed),
        dv * factor[:, None],
        dg * factor,
        dbeta * factor,
    ]


def backward_of(
    rule, inputs, d_o: Tensor, saved: SavedForBackward, documents=None
) -> RuleBackward:
    """A backward that has begun, without the inputs that the rule says it does not
    read."""
    kept = (
        x if n in rule.backward_reads else None for n, x in inputs._asdict().items()
    )
    return rule.begin_backward(d_o, type(inputs)(*kept), saved, documents)


def transposed_in_memory(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def require_dense(*given: Tensor | None) -> None:
    """For stand-ins of kernels that take an address alone, and no strides."""
    assert all(x is None or x.is_contiguous() for x in given)


def run_everything(rule, inputs, d_o, documents, initial, d_final) -> dict[str, Tensor]:
    """All that a rule gives, by name, the map of states included; no states are
    zeros.

    States given have no dense strides, as a dynamic context may hold them; those that
    the rule gives are dense.
    """
    initial, d_final = map(transposed_in_memory, (initial, d_final))
    begun = rule.begin(inputs, documents)
    maps = begun.state_map()
    made = begun.run(initial if initial.any() else None, final=True)
    d_local = backward_of(rule, inputs, d_o.clone(), made.saved, documents).d_initial()
    backward = backward_of(rule, inputs, d_o.clone(), made.saved, documents)
    grads = backward.run(*(x if x.any() else None for x in (initial, d_final)))
    assert made.final_states.is_contiguous() and d_local.is_contiguous()
    return {
        "o": made.o,
        "final": made.final_states,
        "final by the map": maps.apply(initial),
        "d_initial": maps.transposed(d_local).apply(d_final),
        **{
            # over the heads that share one
            name: grad.unflatten(2, (given.shape[2], -1)).sum(3)
            for (name, given), grad in zip(
                inputs._asdict().items(), grads, strict=False
            )
        },
    }


def beside_fp64(
    rule, plain, inputs, d_o, documents, initial, d_final
) -> tuple[dict, dict]:
    """All that the rule gives, and ``plain`` in fp64."""
    wide = type(inputs)(*(x.double() for x in inputs))
    exact = run_everything(
        plain, wide, d_o.double(), documents, initial.double(), d_final.double()
    )
    return run_everything(rule, inputs, d_o, documents, initial, d_final), exact


def root_mean_square_errors(found: dict, exact: dict) -> dict[str, float]:
    """Of each tensor, over its own root mean square."""
    return {
        name: ((found[name] - b).square().mean() / b.square().mean()).sqrt().item()
        for name, b in exact.items()
    }


def run_whole(rule, inputs: RuleInputs, d_o: Tensor, documents=None) -> list[Tensor]:
    o, _, saved = rule.begin(inputs, documents).run()
    grads = backward_of(rule, inputs, d_o, saved, documents).run()
    return [o, *by_key_head(grads, inputs.k.shape[2])]


def run_in_segments(
    rule, inputs: RuleInputs, d_o: Tensor, documents: Documents
) -> list[Tensor]:
    """The same for one sequence whose segments are handed to the rule as documents."""
    forward = rule.begin(inputs, documents)
    local, through = (of_filled(x, documents) for x in forward.state_map())
    entering = torch.zeros_like(local)
    for n in range(1, len(local)):
        entering[n] = through[n - 1] @ entering[n - 1] + local[n - 1]
    o, _, saved = forward.run(entering)
    backward = backward_of(rule, inputs, d_o, saved, documents)
    d_local = of_filled(backward.d_initial(), documents)
    leaving = torch.zeros_like(d_local)
    for n in reversed(range(1, len(local))):
        leaving[n - 1] = through[n].mT @ leaving[n] + d_local[n]
    grads = backward.run(entering, leaving)
    return [o, *by_key_head(grads, inputs.k.shape[2])]


def run_on_ranks(rule, inputs: RuleInputs, d_o: Tensor, lengths) -> list[Tensor]:
    """The same, every segment in calls of its own, as if it lay on a rank of its
    own."""
    parts = [
        (RuleInputs(*x), d)
        for *x, d in zip(
            *(x.split(lengths, dim=1) for x in (*inputs, d_o)), strict=True
        )
    ]
    forwards = []
    state = None
    for part, _ in parts:
        forward = rule.begin(part, None)
        local, through = forward.state_map()
        state = torch.zeros_like(local) if state is None else state
        o, _, saved = forward.run(state)
        forwards.append((state, through, o, saved))
        state = through @ state + local
    found = []
    d_state = torch.zeros_like(state)
    for (part, d), (entering, through, o, saved) in zip(
        parts[::-1], forwards[::-1], strict=True
    ):
        backward = backward_of(rule, part, d, saved)
        d_local = backward.d_initial()
        grads = backward.run(entering, d_state)
        d_state = through.mT @ d_state + d_local
        found.append([o, *by_key_head(grads, inputs.k.shape[2])])
    return [torch.cat(x, dim=1) for x in zip(*found[::-1], strict=True)]


def forwards_from(rule, inputs, documents, initial):
    """Every way to a final state beside its start, zero or ``initial``."""
    found = []
    for start in (None, initial):
        for map_first in (False, True):
            for keep in (False, True):
                forward = rule.begin(inputs, documents)
                if map_first:
                    forward.state_map()
                made = forward.run(start, keep=keep, final=True)
                assert keep or not made.saved.tensors
                assert forward.run(start, keep=keep).final_states is None
                assert torch.equal(forward.run(start, keep=keep).o, made.o)
                found.append(
                    (torch.zeros_like(initial) if start is None else start, made)
                )
    return found


def assert_rows_equal_one_row(run, rule, inputs, d_o: Tensor, documents) -> None:
    """Documents that lie over several batch rows, end to end, have the bits of those in
    one."""

    def in_two_rows(x: Tensor) -> Tensor:
        return x.reshape(2, x.shape[1] // 2, *x.shape[2:])

    got = run(
        rule, type(inputs)(*map(in_two_rows, inputs)), in_two_rows(d_o), documents
    )
    for number, (a, b) in enumerate(
        zip(got, run(rule, inputs, d_o, documents), strict=True)
    ):
        assert a.shape[0] == 2 and torch.equal(a.reshape(b.shape), b), number
