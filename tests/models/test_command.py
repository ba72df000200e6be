"""``python -m megatron_gdn.models``: the list, a model's figures, legal sizes,
flags."""

import json
import shlex
from pathlib import Path

import pytest

from megatron_gdn.models import ENTRIES, find
from megatron_gdn.models.__main__ import launch_flags, main, parse
from megatron_gdn.ops.layout import SizeError
from tests.examples.commands import commands_of, launches_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"


def test_the_commands_of_the_page_print_what_it_shows(capsys):
    commands = [
        c for c in commands_of(PAGE) if c.startswith("python -m megatron_gdn.models")
    ]
    shown = PAGE.read_text()
    assert len(commands) == 3
    for command in commands:
        assert main(shlex.split(command)[3:]) == 0
        printed = capsys.readouterr().out
        assert printed in shown, f"{command} prints now:\n{printed}"


def test_printed_figures_are_those_of_the_stack(capsys):
    assert main(["Qwen3.5-35B-A3B", "--cp", "4", "--length", "131072"]) == 0
    said = capsys.readouterr().out
    model = find("Qwen3.5-35B-A3B")
    stack = model.stack
    assert (
        f"{stack.parameters / 1e9:.2f} B, {stack.active_parameters / 1e9:.2f} B" in said
    )
    assert f"{stack.flops([131072]).step / 131072e9:.2f} G with backward" in said
    assert stack.state_bytes == 30 * 32 * 128 * 128 * 4
    assert stack.conv_bytes == 30 * 3 * (2 * 16 + 32) * 128 * 2
    assert f"{stack.state_bytes / 2**20:.1f} MiB" in said
    assert f"{stack.conv_bytes / 2**10:.0f} KiB" in said


@pytest.mark.parametrize("name", ENTRIES)
def test_every_model_has_figures(name, capsys):
    assert main([name]) == 0 and name in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--tp 3",
            "tensor-parallel size tp=3 is not legal; use one of 1, 2, 4, 8, 16.",
        ),
        (
            "--ep 3",
            "expert-parallel size ep=3 is not legal; use one of 1, 2, 4, 8, 16, 32, 64",
        ),
        ("--cp 0", "cp=0 must be at least 1"),
        (
            "--tp 2 --cp 4 --length 4097",
            "must be a positive multiple of 8, such as 4096, for tp=2 and cp=4",
        ),
        ("--length 0", "length=0 must be a positive multiple of 1, such as 1, for"),
    ],
)
def test_illegal_sizes_are_refused_with_what_is_legal(arguments, message, capsys):
    assert main(["Qwen3.5-35B-A3B", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ENTRIES)
def test_the_legal_sizes_are_those_that_the_layers_take(name):
    model = find(name)
    legal = model.tensor_parallel_sizes()
    assert legal[0] == 1
    for tp in legal:
        layout = model.dims.shard(tp).layout
        headwise = model.headwise_sizes(tp)
        for cp in range(1, layout.state_heads + 1):
            if cp in headwise:
                assert layout.share(cp).state_heads * cp == layout.state_heads
            else:
                with pytest.raises(SizeError):
                    layout.share(cp)


def test_saved_bytes_are_those_that_were_measured():
    """`benchmarks/results/layer.jsonl`, one H100, flash_qla, batches of 8 x 4096 and
    packed."""
    lines = (ROOT / "benchmarks/results/layer.jsonl").read_text().splitlines()
    rows = [
        row
        for row in map(json.loads, lines)
        if row.get("case") in ("8x4096", "thd32768")
    ]
    model = find("Qwen3.5-35B-A3B")
    checked = 0
    for row in rows:
        recompute = {"ours": "none", "ours-recompute": "light"}.get(
            row.get("layer", "")
        )
        if recompute is None:
            continue
        assert (row["hidden"], row["heads"]) == (2048, [16, 32])
        ours = 32768 * model.saved_bytes(recompute=recompute) / 2**20
        # The allocator rounds each tensor's block to 2 MiB: boundaries, sums, the
        # loss's gradient.
        assert 0 <= row["saved"] - ours <= 2, row
        checked += 1
    assert checked == 4


def test_saved_bytes_are_shared_by_tensor_parallel_ranks():
    model = find("Qwen3.5-35B-A3B")
    assert 8 * model.saved_bytes(tp=8) == model.saved_bytes()
    assert model.saved_bytes(tp=2, recompute="layer") == 2 * 2048 / 2
    # The input and the projection row alone.
    assert model.saved_bytes(recompute="full") == 2 * 2048 + 2 * 12352


def test_printed_launches_run_without_apex():
    """Megatron's linears call a kernel of APEX unless a flag says otherwise."""
    printed = [launch_flags(find("tiny"), parse(["tiny"])), *launches_of(ROOT).values()]
    assert len(printed) == 3
    assert all("--no-gradient-accumulation-fusion" in flags for flags in printed)
