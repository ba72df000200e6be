"""The delta rule of every GPU backend: alone, batch invariant, and with states in and
out.

    python3 benchmarks/bench_states.py --out results.jsonl

"forward" and "backward" are a sequence that starts from nothing; "state map", then
"forward with states", and "whole backward with states", of which "d_initial" is the
first call, are those of context parallelism.
"""

from __future__ import annotations

import argparse

import torch
from lib.layers import DEVICE
from lib.measure import environment, table, time_ms, write_lines
from lib.rules import begin_backward

from megatron_gdn.gdn.flash_qla.rule import FlashQlaRule
from megatron_gdn.gdn.rule import FlaGDN, RuleInputs
from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.rules.base import Bits

RULES = {
    "flash_qla": FlashQlaRule,
    "flash_qla batch invariant": lambda: FlashQlaRule(Bits.DETERMINISTIC),
    "fla": FlaGDN,
}
CASES = {
    "1x8192": (1, 8192),
    "1x32768": (1, 32768),
    "2x16384": (2, 16384),
    "2x4096": (2, 4096),
    "8x4096": (8, 4096),
}
# Log-decay per token: of heads as the layer initialises them, and of heads that forget
# nothing, where every part of a sequence must be chained exactly.
DECAYS = {"usual": 1.0, "none": 1e-8}


def rule_inputs(
    tokens: int, heads: tuple[int, int], decay: str
) -> tuple[RuleInputs, torch.Tensor]:
    G, H = heads

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, *shape, device=DEVICE)

    q, k = (
        torch.nn.functional.normalize(normal(G, 128), dim=-1).bfloat16()
        for _ in range(2)
    )
    A = torch.empty(H, device=DEVICE).uniform_(1, 16)
    g = -DECAYS[decay] * A * torch.nn.functional.softplus(normal(H) + 1)
    inputs = RuleInputs(q, k, normal(H, 128).bfloat16(), g, normal(H).sigmoid())
    return inputs, normal(H, 128).bfloat16()


def without_states(rule, inputs: RuleInputs, d_o: torch.Tensor, documents) -> dict:
    """Each call with what it needs from the call before it."""
    saved = rule.begin(inputs, documents).run().saved
    return {
        "forward": lambda: rule.begin(inputs, documents).run(),
        "backward": lambda: begin_backward(rule, inputs, d_o, saved, documents).run(),
    }


def with_states(
    rule, inputs: RuleInputs, d_o: torch.Tensor, documents: Documents
) -> dict:
    """Each call with what it needs from the calls before it."""
    begun = rule.begin(inputs, documents)
    local = begun.state_map().local
    initial = torch.randn_like(local)
    d_final = torch.randn_like(local)
    saved = begun.run(initial).saved

    def backward():
        return begin_backward(rule, inputs, d_o, saved, documents)

    def whole_backward():
        stage = backward()
        return stage.d_initial(), stage.run(initial, d_final)

    return {
        "state map": lambda: rule.begin(inputs, documents).state_map(),
        "forward with states": lambda: begun.run(initial),
        "d_initial": lambda: backward().d_initial(),
        "whole backward with states": whole_backward,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--cores", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--decays", nargs="+", choices=DECAYS, default=list(DECAYS))
    parser.add_argument(
        "--heads", type=int, nargs=2, default=(16, 32), metavar=("KEY", "VALUE")
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", help="append JSON lines to this file")
    args = parser.parse_args()
    setting = {"environment": environment(), "heads": list(args.heads)}
    rows = []
    for case in args.cases:
        documents_count, length = CASES[case]
        offsets = [n * length for n in range(documents_count + 1)]
        documents = Documents.from_cu_seqlens(offsets, offsets[-1], device="cuda")
        for decay in args.decays:
            inputs, d_o = rule_inputs(offsets[-1], tuple(args.heads), decay)
            for name in args.cores:
                found = {}
                problem = (RULES[name](), inputs, d_o, documents)
                for call, run in (
                    without_states(*problem) | with_states(*problem)
                ).items():
                    found[call] = time_ms(run, repeats=args.repeats)["median"]
                    record = {
                        "case": case,
                        "decay": decay,
                        "core": name,
                        "call": call,
                        "ms": found[call],
                        **setting,
                    }
                    write_lines(args.out, [record])
                if not rows:
                    rows.append(["case", "decay", "core", *found])
                rows.append(
                    [case, decay, name, *(f"{ms:.3f}" for ms in found.values())]
                )
    print(table(rows))


if __name__ == "__main__":
    main()
