"""The harness and the certificate find what is planted."""

import json
import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch.distributed as dist

from benchmarks import certificate
from benchmarks.lib import processes
from benchmarks.lib.invariance import check_batch_invariance
from benchmarks.lib.processes import compare_processes, in_processes
from benchmarks.lib.repeats import check_repeats, difference_of, forward_backward
from tests.processes import python
from tests.ranks import RankError, RankPool, _context
from tests.testing import planted


def test_a_shuffled_sum_is_found_and_is_the_only_one():
    x = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
    report = check_repeats(forward_backward(planted.WithShuffledSum(), x), 20)
    assert not report.equal
    difference = report.difference
    assert (difference.name, difference.where) == (
        "weight",
        f"repeat {report.repeats - 1}",
    )
    assert not report.also and set(report.digests) == {"output", "weight", "dx"}
    assert 1 <= difference.elements <= difference.of == 8
    assert 0 < difference.relative < 1e-4
    assert "weight differs in repeat" in str(report)


@pytest.mark.slow
def test_a_read_of_memory_never_written_is_found():
    """In a new process, whose heap has the same history every time."""
    with ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        report = pool.submit(planted.check_unwritten).result()
    assert report.difference.name == "buffer" and report.difference.elements <= 2048


@pytest.mark.slow
def test_a_result_that_depends_on_the_process_is_found():
    reports = in_processes(planted.check_process_number)
    assert all(report.equal for report in reports)
    assert compare_processes(reports) == "pid differs between process 0 and process 1"


@pytest.mark.slow
def test_a_process_that_fails_says_why():
    with pytest.raises(
        RuntimeError, match="process 0(.|\n)*no luck in 0(.|\n)*no luck in 1"
    ):
        in_processes(planted.fail)


def test_bits_are_compared_not_values():
    nan = torch.tensor([float("nan"), 0.0])
    assert difference_of("x", "here", nan, nan.clone()) is None
    zero = difference_of("x", "here", torch.zeros(2), torch.tensor([0.0, -0.0]))
    assert zero.elements == 1 and zero.largest == 0


def packed_run(module):
    def run(x, offsets, d_out):
        class Packed(torch.nn.Module):
            def forward(self, x):
                return module(x, offsets)

        return forward_backward(Packed(), x, d_out)()

    return run


LENGTHS = (70, 1, 64, 130)


def documents(width):
    return [
        torch.randn(n, 1, width, generator=torch.Generator().manual_seed(n))
        for n in LENGTHS
    ]


def test_a_document_that_feels_its_neighbours_is_found():
    def leaky(x, offsets):
        return x - 1e-3 * x.mean(0)

    xs = documents(4)
    found = check_batch_invariance(packed_run(leaky), xs, documents(4))
    assert {"output", "dx"} == {difference.name for difference in found}
    assert found[0].where == "first"

    def by_position(x, offsets):
        return x * torch.arange(len(x))[:, None, None]

    found = check_batch_invariance(packed_run(by_position), xs, documents(4))
    assert {difference.where for difference in found} == {"last", "in the middle"}


@pytest.fixture
def pool():
    started = RankPool(2)
    yield started
    started.stop()


def raise_on_the_second_rank() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the only reason")
    dist.barrier()


def sleep_on_the_first_rank() -> None:
    if dist.get_rank() == 0:
        time.sleep(1000)


@pytest.mark.slow
def test_what_a_later_rank_raises_is_told_while_the_first_waits_for_it(
    pool, monkeypatch
):
    monkeypatch.setattr("tests.ranks.GRACE_S", 1)
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1:(.|\n)*the only reason"):
        pool.run(raise_on_the_second_rank)
    assert time.monotonic() - start < pool.timeout_s / 2


@pytest.mark.slow
def test_a_rank_that_does_not_answer_tells_where_it_is(pool):
    pool.run(dist.barrier)
    pool.timeout_s = 1
    with pytest.raises(
        RankError, match="rank 0:\nno answer(.|\n)*sleep_on_the_first_rank"
    ):
        pool.run(sleep_on_the_first_rank)


def test_a_row_is_what_its_tensors_say():
    """Two tokens of two words; the second's probability falls from 1/2 to 1/4."""
    one = {
        "output": torch.tensor([1.0, -2.0]),
        "x's gradient": torch.tensor([1.0]),
        "input gradient": torch.tensor([4.0]),
        "logits": torch.zeros(2, 2),
        "token": torch.tensor([0, 1]),
    }
    logits = torch.tensor([[0.0, 0.0], [0.75, 0.25]])
    logits[1] = logits[1].log()
    found = one | {
        "output": torch.tensor([1.0, -1.9]),
        "input gradient": torch.tensor([3.0]),
    }
    row = certificate._make_row(
        "fp32", "headwise", 2, found | {"logits": logits}, one, one
    )
    assert row.output == pytest.approx(0.05) and row.gradients == 0.25
    assert row.kl == pytest.approx((math.log(0.5 / 0.75) + math.log(0.5 / 0.25)) / 4)
    assert row.ratio_mean == pytest.approx(
        0.75
    ) and row.ratio_farthest == pytest.approx(0.5)
    assert row.clipped == 0.5


def test_documents_that_the_ranks_cannot_share_are_refused(capsys):
    with pytest.raises(SystemExit):
        certificate.parse_arguments(["--cp", "2", "--lengths", "6"])
    assert "every document must be a multiple of 4" in capsys.readouterr().err


SMALL = "--heads 2:4 --head-dim 16 --hidden 32 --lengths 160 32 --json --cp"


@pytest.mark.slow
def test_both_schemes_stay_within_rounding_of_one_rank(monkeypatch, capsys):
    monkeypatch.setattr(processes, "CONTEXT", _context("gloo"))
    monkeypatch.setattr(certificate, "in_processes", in_imported)
    certificate.main([*SMALL.split(), "2"])
    assert_within_rounding(capsys.readouterr().out, [2])


@pytest.mark.nightly
def test_the_command_certifies_more_ranks_without_a_warning():
    command = "benchmarks/certificate.py", *SMALL.split(), "2", "4"
    done = python(*command, timeout=600)
    assert done.stderr == ""
    assert_within_rounding(done.stdout, [2, 4])


def in_imported(function, *args, **options):
    """In ranks that have imported Megatron already."""
    return in_processes(run_uncompiled, function, *args, **options)


def run_uncompiled(index, function, *args):
    torch.compiler.set_stance("force_eager")
    return function(index, *args)


def assert_within_rounding(printed: str, cp: list[int]) -> None:
    """A share of the bits of one rank: errors against fp64 are those of one rank, twice
    at most."""
    rows = [json.loads(line) for line in printed.splitlines()]
    assert len(rows) == 2 * (1 + 2 * len(cp))
    for row in rows:
        (one,) = (
            x for x in rows if x["ranks"] == 1 and x["precision"] == row["precision"]
        )
        assert (
            0 < row["output"] <= 2 * one["output"]
            and row["gradients"] <= 2 * one["gradients"]
        )
        # fp32: a log-probability off by some hundred roundings; the KL is its square.
        if row["precision"] == "fp32":
            assert (
                row["ratio_farthest"] < 1e-5
                and row["kl"] < 1e-10
                and not row["clipped"]
            )
