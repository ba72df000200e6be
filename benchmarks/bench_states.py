"""The delta rule of every GPU core: alone, batch invariant, and with states in and out.

    python3 benchmarks/bench_states.py --out results.jsonl

"forward" and "backward" are a sequence that starts from nothing; "transition", "forward with
states", "d_initial" and "backward with states" are the four calls of context parallelism.
"""

from __future__ import annotations

import argparse

import torch
from layers import DEVICE
from measure import environment, table, time_ms, write_lines

from megatron_gdn.ops.delta_rule.fla import FlaCore
from megatron_gdn.ops.delta_rule.flash_qla import FlashQlaCore
from megatron_gdn.ops.delta_rule.resolve import RuleInputs
from megatron_gdn.ops.documents import Documents

CORES = {
    "flash_qla": FlashQlaCore,
    "flash_qla batch invariant": lambda: FlashQlaCore(batch_invariant=True),
    "fla": FlaCore,
}
CASES = {"1x8192": (1, 8192), "1x32768": (1, 32768), "2x16384": (2, 16384), "2x4096": (2, 4096),
         "8x4096": (8, 4096)}  # fmt: skip
# Log-decay per token: of heads as the layer initialises them, and of heads that forget nothing,
# where every part of a sequence must be chained exactly.
DECAYS = {"usual": 1.0, "none": 1e-8}


def rule_inputs(tokens: int, heads: tuple[int, int], decay: str) -> tuple[RuleInputs, torch.Tensor]:
    G, H = heads

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, *shape, device=DEVICE)

    q, k = (torch.nn.functional.normalize(normal(G, 128), dim=-1).bfloat16() for _ in range(2))
    A = torch.empty(H, device=DEVICE).uniform_(1, 16)
    g = -DECAYS[decay] * A * torch.nn.functional.softplus(normal(H) + 1)
    inputs = RuleInputs(q, k, normal(H, 128).bfloat16(), g, normal(H).sigmoid())
    return inputs, normal(H, 128).bfloat16()


def without_states(core, inputs: RuleInputs, d_o: torch.Tensor, documents) -> dict:
    """Each call with what it needs from the call before it."""
    _, saved, plan = core.forward(inputs, documents, True)
    silent = inputs._replace(g=None)
    return {
        "forward": lambda: core.forward(inputs, documents, True),
        "backward": lambda: core.backward(d_o, silent, saved, plan, documents),
    }


def with_states(core, inputs: RuleInputs, d_o: torch.Tensor, documents: Documents) -> dict:
    """Each call with what it needs from the calls before it."""
    silent = inputs._replace(g=None)
    made = core.transition(inputs, documents)
    initial, d_final = torch.randn_like(made.local), torch.randn_like(made.local)
    carried = {"initial": initial, "work": made.work}
    _, kept, states = core.forward(inputs, documents, True, **carried)
    _, work = core.d_initial(d_o, silent, kept, states, documents)
    return {
        "transition": lambda: core.transition(inputs, documents),
        "forward with states": lambda: core.forward(inputs, documents, True, **carried),
        "d_initial": lambda: core.d_initial(d_o, silent, kept, states, documents),
        "backward with states": lambda: core.backward(
            d_o, silent, kept, states, documents, initial, d_final, work
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--cores", nargs="+", choices=CORES, default=list(CORES))
    parser.add_argument("--decays", nargs="+", choices=DECAYS, default=list(DECAYS))
    parser.add_argument("--heads", type=int, nargs=2, default=(16, 32), metavar=("KEY", "VALUE"))
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
                found, problem = {}, (CORES[name](), inputs, d_o, documents)
                for call, run in (without_states(*problem) | with_states(*problem)).items():
                    found[call] = time_ms(run, repeats=args.repeats)["median"]
                    record = {"case": case, "decay": decay, "core": name, "call": call,
                              "ms": found[call], **setting}  # fmt: skip
                    write_lines(args.out, [record])
                if not rows:
                    rows.append(["case", "decay", "core", *found])
                rows.append([case, decay, name, *(f"{ms:.3f}" for ms in found.values())])
    print(table(rows))


if __name__ == "__main__":
    main()
