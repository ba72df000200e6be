"""A front and a rule from differentiable functions, run again under autograd in a
backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.rules.base import Bits, Rule, RuleOutput, SavedForBackward
from megatron_gdn.ops.state_maps.state_map import StateMap


class AutogradFront:
    """A front of ``make(proj, parameters, documents, history)``, which gives the rule's
    ``inputs`` in fp32 or wider; those named in ``convolved`` are rounded to the rows'
    dtype."""

    recomputed: tuple[str, ...] = ()
    is_triton = False

    def __init__(self, layout, make, inputs, convolved):
        self.layout = layout
        self.input_names = inputs._fields
        self.convolved_inputs = convolved
        self._make = make

    def forward(self, proj, parameters, documents, only=None, history=None):
        with torch.no_grad():
            made = self._make(
                _wide(proj), [_wide(x) for x in parameters], documents, history
            )
        kept = {
            name: (
                x.to(proj.dtype) if name in self.convolved_inputs else x
            ).contiguous()
            if only is None or name in only
            else None
            for name, x in made._asdict().items()
        }
        return type(made)(**kept)

    def backward(self, proj, parameters, grads, d_proj, documents, history=None):
        before = None if history is None else history.rows
        leaves: list[Any] = [
            None if x is None else _wide(x).detach().requires_grad_()
            for x in (before, proj, *parameters)
        ]
        given = [x for x in leaves if x is not None]
        before, *leaves = leaves
        past = None if history is None else history._replace(rows=before)
        with torch.enable_grad():
            made = self._make(leaves[0], leaves[1:], documents, past)
        d_made = [_wide(getattr(grads, name)) for name in self.input_names]
        found = iter(torch.autograd.grad(made, given, d_made, materialize_grads=True))
        if history is not None:
            history.d_rows.copy_(next(found))
        d_rows = next(found)
        rest = [None if x is None else next(found) for x in leaves[1:]]
        gate = self.layout.columns("z")
        d_proj[..., : gate.start] = d_rows[..., : gate.start]
        d_proj[..., gate.stop :] = d_rows[..., gate.stop :]
        return tuple(
            None if x is None or d_x is None else d_x.to(x.dtype)
            for x, d_x in zip(parameters, rest, strict=True)
        )


class AutogradRule(Rule):
    """A ``Rule`` of ``run(inputs, initial, documents)``, which gives output and final
    states, and of ``through(inputs, documents)``, the factors ``[N, H, K, 1]`` by which
    an initial state decays."""

    bits = Bits.DETERMINISTIC

    def __init__(self, name, run, through, inputs):
        self.name, self.backward_reads = name, frozenset(inputs._fields)
        self._run = run
        self._through = through

    def begin(self, inputs: Any, documents: Documents | None) -> _Forward:
        return _Forward(self, inputs, documents)

    def begin_backward(self, d_o, inputs, saved, documents):
        return _Backward(self, d_o, inputs, documents)


class _Forward:
    def __init__(
        self, rule: AutogradRule, inputs: Any, documents: Documents | None
    ) -> None:
        self._rule = rule
        self._inputs = inputs
        self._documents = documents

    @torch.no_grad()
    def state_map(self) -> StateMap:
        _, local = self._rule._run(self._inputs, None, self._documents)
        return StateMap(local, self._rule._through(self._inputs, self._documents))

    @torch.no_grad()
    def run(self, initial=None, *, keep=True, final=False):
        o, last = self._rule._run(self._inputs, initial, self._documents)
        return RuleOutput(o, last if final else None, SavedForBackward())


class _Backward:
    def __init__(self, rule, d_o, inputs, documents):
        self._rule = rule
        self._d_o = d_o
        self._inputs = inputs
        self._documents = documents

    def _grads(
        self, initial: Tensor | None, d_final: Tensor | None
    ) -> tuple[Any, Tensor]:
        inputs = type(self._inputs)(
            *(x.detach().requires_grad_() for x in self._inputs)
        )
        if initial is None:
            with torch.no_grad():
                initial = torch.zeros_like(
                    self._rule._run(inputs, None, self._documents)[1]
                )
        initial = initial.detach().requires_grad_()
        with torch.enable_grad():
            o, final = self._rule._run(inputs, initial, self._documents)
        d_final = torch.zeros_like(final) if d_final is None else d_final
        *grads, d_initial = torch.autograd.grad(
            (o, final),
            (*inputs, initial),
            (self._d_o.to(o.dtype), d_final),
            materialize_grads=True,
        )
        return type(inputs)(*grads), d_initial

    def d_initial(self) -> Tensor:
        return self._grads(None, None)[1]

    def run(self, initial: Tensor | None = None, d_final: Tensor | None = None) -> Any:
        return self._grads(initial, d_final)[0]


def _wide(x: Tensor | None) -> Any:
    return None if x is None else x.to(torch.promote_types(x.dtype, torch.float32))
