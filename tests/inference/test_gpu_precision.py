"""bf16 on a GPU: prefill and decode are as exact as the plain rule in bf16, however
cut.

Errors are root mean squares against the training path in fp64 on the same bf16 rows and
parameters. 1.2 is what the kernels may differ by in the order of their sums.
"""

import pytest
import torch

from megatron_gdn.gdn.rule import resolve_rule
from megatron_gdn.inference import decode
from megatron_gdn.mamba2.rule import choose_ssd
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.state_maps.state_map import StateShape
from tests.inference.row_mixers import (
    copied,
    gdn_kind,
    kda_kind,
    mamba2_kind,
    prefilled,
    run_in_parts,
)

pytestmark = pytest.mark.gpu

HEADS = HeadSizes(16, 32, 128, 128)
KINDS = {"gdn": gdn_kind(HEADS), "mamba2": mamba2_kind(128, 8, 64, 128)}
PARTS = ((200,), (137, 63), (64, 120, -16), (1, 183, -7, -9), (-3, 197))


def rule_of(kind, backend):
    where = {"device": "cuda", "dtype": torch.bfloat16}
    if kind == "gdn":
        return resolve_rule(backend, sizes=HEADS, **where).rule
    state = StateShape(128, 128, 64, diagonal=True)
    return choose_ssd(backend, state, torch.device("cuda"), torch.bfloat16).rule


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("name", KINDS)
def test_generation_in_bf16_is_as_exact_as_the_plain_rule(name, backend):
    kind = KINDS[name]
    device = torch.device("cuda")
    rows = kind.rows(200, 2, torch.bfloat16).to(device)
    parameters = kind.draw(torch.bfloat16).to(device)
    exact = kind.train(rows.double(), parameters.to(torch.float64), kind.plain, None)

    def error(mixed) -> float:
        return (mixed.double() - exact).square().mean().sqrt().item()

    plain = error(kind.train(rows, parameters, kind.plain, None))
    mixer = kind.make(rows, parameters, rule_of(name, backend))
    found = {stages: error(run_in_parts(mixer, rows, stages)[0]) for stages in PARTS}
    print(
        name,
        mixer.rule.name,
        f"plain {plain:.2e}",
        *(f"{e / plain:.3f}" for e in found.values()),
    )
    assert plain > 0 and max(found.values()) <= 1.2 * plain, (plain, found)


@pytest.mark.parametrize(
    "kind", [*KINDS.values(), kda_kind(HEADS)], ids=lambda kind: kind.name
)
def test_a_captured_step_has_the_bits_of_the_eager_one(kind):
    """Every replay goes on from what the one before wrote."""
    rows = kind.rows(30, 3, torch.bfloat16).cuda()
    stages = kind.make(rows, kind.draw(torch.bfloat16).to("cuda"), kind.plain)
    _, memory = prefilled(stages, rows[:20])
    eager = copied(memory)
    fed = rows[20:21].clone()
    decode(fed, stages, copied(memory))  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = decode(fed, stages, memory)
    for token in rows[20:].split(1):
        fed.copy_(token)
        graph.replay()
        assert torch.equal(made, decode(token, stages, eager))
    assert all(map(torch.equal, memory[:2], eager[:2]))
