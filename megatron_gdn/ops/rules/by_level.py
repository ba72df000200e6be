"""A rule over documents that continue others, see :mod:`..trees`.

    forward      S_in of a child = S_out of its parent                       from the top down
    backward     dS_out of a parent = sum of its children's dS_in            from the bottom up
                 dS_in = through^T dS_out + d_local

Legend: N sequences of one level, H heads with a state, K rows of a state, V columns, S seq.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..state_maps.state_map import StateMap
from ..switches import full_fp32_matmul
from ..trees import Level, TreeDocuments
from .base import Rule, RuleBackward, RuleForward, RuleOutput, Saved, on_tokens

ALIGNMENT = 16  # bytes: what kernels take for granted of a tensor


class ForwardByLevel(RuleForward):
    documents: TreeDocuments

    def state_map(self) -> StateMap:
        raise NotImplementedError("documents that continue others lie whole on a rank.")

    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        assert initial is None and not final
        pieces, tensors, plans = [], [], []
        ended: Tensor | None = None
        for level in self.documents.levels:
            begun = self.rule.rule.begin(_of(level, self.inputs), level.documents)
            entering, through = None, None
            if level.parents is not None:
                assert ended is not None
                entering = ended.index_select(0, level.parents)
                if keep and level.continued:
                    through = begun.state_map().through
            o, ended, saved = begun.run(entering, keep=keep, final=level.continued)
            pieces.append(o)
            tensors += [entering, through, *saved.tensors]
            plans.append((saved.plan, len(saved.tensors)))
        o = _in_buffer(pieces, self.documents)
        return RuleOutput(o, None, Saved(tuple(tensors) if keep else (), tuple(plans)))


class BackwardByLevel(RuleBackward):
    documents: TreeDocuments

    def d_initial(self) -> Tensor:
        raise NotImplementedError("no state enters the top of a tree.")

    def run(self, initial: Tensor | None = None, d_final: Tensor | None = None) -> Any:
        assert initial is None and d_final is None
        tensors, grads = list(self.saved.tensors), []
        levels = self.documents.levels
        for number in reversed(range(len(levels))):
            level, (plan, count) = levels[number], self.saved.plan[number]
            entered, through, *mine = tensors[-count - 2 :]
            del tensors[-count - 2 :]
            begun = self.rule.rule.begin_backward(
                _rows(level, self.d_o), _of(level, self.inputs),
                Saved(tuple(mine), plan), level.documents,
            )  # fmt: skip
            if level.parents is None:
                grads.insert(0, begun.run(None, d_final))
                break
            d_entered = begun.d_initial()
            if d_final is not None:
                d_entered = _carried(StateMap(d_entered, through), d_final)
            grads.insert(0, begun.run(entered, d_final))
            d_final = _summed(d_entered, level, len(levels[number - 1].documents.lengths))
        return _gathered(grads, self.documents)


class RuleByLevel(Rule):
    """Runs ``rule`` once for each level; takes and gives what the rule does.

    Padding of a slot belongs to no sequence: its ``o`` and its gradients are zero.
    """

    forward, backward = ForwardByLevel, BackwardByLevel

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.name, self.bits = rule.name, rule.bits
        self.operand_dtype, self.reads_again = rule.operand_dtype, rule.reads_again


def _carried(maps: StateMap, d_final: Tensor) -> Tensor:
    """``through^T d_final + local``; products of one shape, whatever other sequences there are."""
    if maps.is_diagonal:
        return maps.apply(d_final)
    with full_fp32_matmul(d_final.device.type):
        pairs = zip(*maps, d_final, strict=True)
        return torch.stack([torch.baddbmm(local, m.mT, d) for local, m, d in pairs])


def _summed(d_entered: Tensor, level: Level, above: int) -> Tensor:
    """``[above, H, K, V]``: for every document of the level above, the sum over its children."""
    total = d_entered.new_zeros(above, *d_entered.shape[1:])
    for parents, children in level.siblings:
        total[parents] += d_entered[children]
    return total


def _rows(level: Level, x: Tensor) -> Tensor:
    """The tokens of a level, of ``[1, S, ...]``."""
    tokens = level.tokens
    if isinstance(tokens, slice):
        rows = x[:, tokens]
        return rows if rows.data_ptr() % ALIGNMENT == 0 else rows.clone()
    if x.stride(1) == 0:  # one value for all tokens
        return x[:, : len(tokens)]
    return x.index_select(1, tokens)


def _of(level: Level, inputs: Any) -> Any:
    return on_tokens(inputs, lambda x: _rows(level, x))


def _in_buffer(pieces: list[Tensor], documents: TreeDocuments) -> Tensor:
    """``[1, S, ...]`` from the levels' rows; zero where there is padding."""
    if len(pieces) == 1 and pieces[0].shape[1] == documents.total_tokens:
        return pieces[0]
    whole = pieces[0].new_zeros(1, documents.total_tokens, *pieces[0].shape[2:])
    for piece, level in zip(pieces, documents.levels, strict=True):
        whole[:, level.tokens] = piece
    return whole


def _gathered(grads: list[Any], documents: TreeDocuments) -> Any:
    """One tuple of gradients from those of the levels, with the largest factor of each head."""
    kind, factor = type(grads[0]), {}
    if getattr(grads[0], "factor", None) is not None:
        largest = torch.stack([each.factor for each in grads]).amax(0)
        grads = [_scaled(each, each.factor / largest) for each in grads]
        factor = {"factor": largest}
    fields = [x for x in kind._fields if x != "factor"]
    made = {x: _in_buffer([getattr(each, x) for each in grads], documents) for x in fields}
    return kind(**made, **factor)


def _scaled(grads: Any, by: Tensor) -> Any:
    """All gradients of the heads, ``[1, S, heads, ...]``, times ``by [H]``."""

    def scaled(x: Tensor) -> Tensor:
        heads = by if x.shape[2] == len(by) else by[:: len(by) // x.shape[2]]
        return x * heads.to(x.dtype).view(-1, *[1] * (x.dim() - 3))

    changed = {x: scaled(getattr(grads, x)) for x in grads._fields if x != "factor"}
    return grads._replace(**changed)
