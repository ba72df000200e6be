"""Do FlashQLA's stages and our preparation repeat, each by itself? Where do they not?

    for n in 1 2 3 4; do python3 benchmarks/repeat_stages.py --seconds 60 & done; wait
    python3 benchmarks/repeat_stages.py --without-fences     FlashQLA as it is

Fixed inputs, 8192 tokens, beside a competing stream, for as long as told; every result is compared
with the first, bit for bit. Several processes compete with each other. An element that differs
is looked up where a late bulk store would have found it: in what the buffer held before (see
``megatron_gdn/ops/fused/cores/flash_qla_fences.py``).

Legend: T tokens, G key heads, H value heads.
"""

from __future__ import annotations

import argparse
import time

import torch
from bench_states import rule_inputs
from measure import time_ms
from torch import Tensor

from megatron_gdn.ops.delta_rule import flash_qla_plan
from megatron_gdn.ops.delta_rule.flash_qla import FlashQlaCore
from megatron_gdn.ops.front import gdn as prepare
from megatron_gdn.ops.head_sizes import HeadSizes
from megatron_gdn.testing.pressure import Competitor

NAMES = ("dq", "dk", "dv", "dg", "dbeta")
# The buffer that FlashQLA's backward sends dv from held dk of the chunk after before, and so on.
BEFORE = {"dq": ("dv", 0), "dk": ("dq", 0), "dv": ("dk", 64), "o": ("o", -64)}
SHOWN = 12  # differences described


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, nargs=2, default=(16, 32), metavar=("KEY", "VALUE"))
    parser.add_argument("--without-fences", action="store_true")
    return parser.parse_args()


class Stages:
    """Everything to repeat, by name."""

    def __init__(self, tokens: int, heads: tuple[int, int]) -> None:
        self.inputs, self.d_o = rule_inputs(tokens, heads, "usual")
        self.core = FlashQlaCore(batch_invariant=True)
        self.o, self.saved, self.plan = self.core.forward(self.inputs, None, True)
        self.sizes = HeadSizes(*heads, 128, 128)
        make = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=make, device="cuda")

        self.proj = normal(tokens, 1, self.sizes.width).bfloat16()
        self.parameters = (
            normal(self.sizes.conv_width, 1, 4).bfloat16(), None, normal(heads[1]), normal(heads[1])
        )  # fmt: skip
        self.grads = [x.clone() for x in self.backward().values()]

    def forward(self) -> dict[str, Tensor]:
        return {"o": self.core.forward(self.inputs, None, False)[0]}

    def backward(self) -> dict[str, Tensor]:
        inputs = self.inputs._replace(g=None)
        grads = self.core.backward(self.d_o, inputs, self.saved, self.plan, None)
        return dict(zip(NAMES, grads[:5], strict=True))

    def preparation(self) -> dict[str, Tensor]:
        d_proj = torch.zeros_like(self.proj)
        grads = prepare.prepare_backward(
            self.proj, *self.parameters, self.sizes, *self.grads, d_proj
        )
        return {"d_proj": d_proj, "d_conv": grads.conv_weight, "d_A_log": grads.A_log}

    def all(self) -> dict[str, Tensor]:
        return {**self.forward(), **self.backward(), **self.preparation()}


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def describe(name: str, now: Tensor, first: dict[str, Tensor]) -> str:
    unequal = bits(now) != bits(first[name])
    where = unequal.nonzero()
    spans = [f"{column.min().item()}..{column.max().item()}" for column in where.T]
    said = f"{len(where)} of {now.numel()} elements, at [{', '.join(spans)}]"
    if name in BEFORE:
        other, later = BEFORE[name]
        there = where[:, 1] + later
        at = where[(there >= 0) & (there < now.shape[1])]
        row, token, head, column = at.T
        same = (
            bits(now)[row, token, head, column]
            == bits(first[other])[row, token + later, head, column]
        )
        share = same.sum().item() / len(where)
        said += f"; {share:.0%} of them are those of {other}, {later} tokens later"
    return said


def main() -> None:
    args = arguments()
    if args.without_fences:
        flash_qla_plan.fence_bulk_stores = lambda *_: None
    stages = Stages(args.tokens, tuple(args.heads))
    first = {name: x.clone() for name, x in stages.all().items()}
    forward, backward = time_ms(stages.forward)["median"], time_ms(stages.backward)["median"]
    print(f"forward {forward:.3f} ms, backward {backward:.3f} ms", flush=True)
    competitor, until = Competitor("cuda"), time.monotonic() + args.seconds
    differing, shown, runs = dict.fromkeys(first, 0), 0, 0
    while time.monotonic() < until:
        competitor.start(runs)
        now, runs = stages.all(), runs + 1
        equal = torch.stack([(bits(x) == bits(first[name])).all() for name, x in now.items()])
        for name, same in zip(now, equal.tolist(), strict=True):
            if same:
                continue
            differing[name] += 1
            if shown < SHOWN:
                shown += 1
                print(f"run {runs}, {name}: {describe(name, now[name], first)}", flush=True)
    found = ", ".join(f"{name} {count}" for name, count in differing.items() if count)
    print(f"{runs} runs{', without fences' * args.without_fences}; differing: {found or 'nothing'}")


if __name__ == "__main__":
    main()
