"""What compiling a front's kernels costs, which no result shows; it needs no GPU."""

import pytest

pytest.importorskip("triton", minversion="3.6")

import torch

from benchmarks.lib.problem import TAPS, Problem
from megatron_gdn.ops.front.history import History, HistoryTable
from tests.compilation import compile_for_hopper, loops

pytestmark = pytest.mark.nightly

# an entry of the tile table each; multiples of 16 and not
LENGTHS = [32768, 8192, 2048, 1000, 1]
LAYOUTS = {"dense": 0, "packed": 3}


@pytest.fixture(scope="module", params=LAYOUTS)
def compilations(request):
    with compile_for_hopper() as done:
        for tokens in LENGTHS:
            problem = Problem(tokens, (16, 32), LAYOUTS[request.param])
            problem.backward()
            for only in (None, ("q",), ("q", "k", "v"), ("g",)):
                problem.forward(only=only)
    return [one for one in done if one.kernel.startswith("front")]


def test_one_compilation_serves_every_length_and_every_choice_of_parts(compilations):
    assert sorted(one.kernel for one in compilations) == [
        "front_backward_kernel",
        "front_forward_kernel",
    ]


def test_no_stage_of_the_compiler_runs_away(compilations):
    """Those before LLVM take 0.8 to 1.4 times as long as LLVM and ptxas; a walk
    inlined into its kernel, or masks made anew in every step, take four times as
    long and more."""
    for one in compilations:
        after = sum(one.stages[stage] for stage in ("llir", "ptx", "cubin"))
        assert one.stages["ttgir"] < 2.5 * after, one


def test_loops_stay_in_registers_and_copy_ahead(compilations):
    """A frame of 16 bytes for a function that is called; a walk that watches for
    boundaries spills one or two numbers more, outside of the loop for the most part."""
    for one in compilations:
        assert one.stack <= 32, one
        walks = [counts for counts in loops(one) if counts["LDGSTS64"]]
        assert len(walks) == 4, "key and value heads, with and without masks"
        for counts in walks:
            assert counts["STG64"] == 4, counts  # a row of four steps each
            assert counts["STL"] == 0 and counts["LDL"] <= 5, counts
            assert counts["LDG"] == 0, "all loads of a loop are copies ahead"


def test_loops_with_a_history_stay_in_registers():
    """With 96 registers per thread, a loop of four tokens stored 55 numbers to memory
    and loaded 62. With 128, 64 pieces take 0.9 ms in place of 2.7 (H200, 2026-11-29).
    """
    problem = Problem(32768, (16, 32), documents=3)
    channels = problem.sizes.layout.conv_width

    def indices(*shape):
        return torch.zeros(shape, dtype=torch.int32, device="meta")

    table = HistoryTable(
        rows_before=indices(3, TAPS - 1),
        edge_tokens=indices(3, TAPS - 1),
        edge_index=indices(32768),
        gradient_additions=indices(1, 2),
    )
    rows = torch.zeros(9, 1, channels, dtype=torch.bfloat16, device="meta")
    history = History(rows, table).with_gradient_buffer()
    given = problem.proj, problem.parameters, problem.grads, problem.d_proj
    with compile_for_hopper() as done:
        problem.front.backward(*given, problem.documents, history)
    (backward,) = [one for one in done if one.kernel == "front_backward_kernel"]
    walks = [counts for counts in loops(backward) if counts["LDGSTS64"]]
    assert len(walks) == 4, "key and value heads, with and without masks"
    for counts in walks:
        assert counts["STL"] <= 2 and counts["LDL"] <= 10, counts


def test_many_value_heads_to_a_key_head_fit_into_the_shared_memory_of_a_small_gpu():
    with compile_for_hopper() as done:
        Problem(1000, (1, 16)).backward()
    (backward,) = [one for one in done if one.kernel == "front_backward_kernel"]
    assert 32 << 10 < backward.shared < 99 << 10, "loads are still copied ahead"
