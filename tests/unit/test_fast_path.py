"""In every benchmarked shape a Hopper GPU takes the fastest rule and the kernels.

The GPU and the packages are given as data, so a CPU tells which fallbacks a launch
would log.
"""

import re

import pytest
import torch

from megatron_gdn.gdn.front import gdn_table
from megatron_gdn.gdn.rule import resolve_rule
from megatron_gdn.gdn2.front import gdn2_table
from megatron_gdn.gdn2.rule import choose_gdn2
from megatron_gdn.gdn2.sizes import gdn2_layout
from megatron_gdn.gdp.front import gdp_table
from megatron_gdn.gdp.layer import choose_gdp
from megatron_gdn.gdp.sizes import gdp_layout
from megatron_gdn.kda.front import kda_table
from megatron_gdn.kda.rule import choose_kda
from megatron_gdn.kda.sizes import kda_layout
from megatron_gdn.mamba2.front import mamba2_table
from megatron_gdn.mamba2.rule import choose_ssd
from megatron_gdn.mamba2.sizes import Mamba2Dims
from megatron_gdn.ops import obstacles
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.front.plain import PlainFront, front_of
from megatron_gdn.ops.rules import repeatable
from megatron_gdn.ops.rules.base import Bits
from tests.processes import ROOT

VERSIONS = {
    "flash-qla": "0.1.3",
    "tilelang": "0.1.15",
    "triton": "3.6.0",
    "flash-linear-attention": "0.6.0",
    "fla-core": "0.6.0",
}
CUDA = torch.device("cuda")
BF16 = torch.bfloat16
CACHES = (
    obstacles.why_not_flash_qla_package,
    obstacles.why_not_fla_package,
    obstacles._needs_tilelang,
    obstacles.why_not_triton,
    obstacles.log_obstacle_once,
    front_of,
)


@pytest.fixture
def machine(monkeypatch, caplog):
    """``machine(capability, **versions)``: this GPU, and packages besides `VERSIONS`;
    returns a function for the fallbacks that were logged since."""

    def install(capability=(9, 0), **versions):
        there = VERSIONS | {name.replace("_", "-"): v for name, v in versions.items()}

        def find_spec(name):
            package = {"fla": "flash-linear-attention"}.get(name, name)
            return there.get(package.replace("_", "-"))

        monkeypatch.setattr(obstacles, "find_spec", find_spec)
        for module in (obstacles, repeatable):
            monkeypatch.setattr(module, "installed_version", there.get)
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device=None: capability
        )
        for cache in CACHES:
            cache.cache_clear()
        caplog.clear()
        return lambda: caplog.messages

    yield install
    for cache in CACHES:
        cache.cache_clear()


def benchmarked(monkeypatch) -> set[HeadSizes]:
    """Of a Gated DeltaNet: users' shapes, which hold those of README's picture."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from lib.cases import parse
    from run import registry

    cases = map(parse, registry()["shapes"]["cases"])
    return {HeadSizes(*case.sizes["heads"], 128, 128) for case in cases}


def rule_and_front_of(sizes: HeadSizes, bits: Bits, operands: str = "fp16"):
    chosen = resolve_rule(
        device=CUDA, dtype=BF16, sizes=sizes, bits=bits, operands=operands
    )
    front = front_of(gdn_table(sizes.layout), "cuda", BF16, 4, bits=bits)
    return chosen.rule, front


@pytest.mark.parametrize("operands", ["fp16", "bf16"])
def test_no_fallback_is_taken_in_the_shapes_of_the_benchmarks(
    machine, monkeypatch, operands
):
    fallbacks = machine()
    for sizes in benchmarked(monkeypatch):
        rule, front = rule_and_front_of(sizes, Bits.FREE, operands)
        assert rule.name == "flash_qla" and front.is_triton, sizes
    assert fallbacks() == []


def test_no_fallback_is_taken_in_deterministic_mode_where_bits_were_seen_to_repeat(
    machine,
):
    fallbacks = machine()
    for value_heads in (16, 32, 64):
        sizes = HeadSizes(16, value_heads, 128, 128)
        for bits in (Bits.DETERMINISTIC, Bits.ON_GRID):
            rule, front = rule_and_front_of(sizes, bits, "bf16")
            assert rule.name == "flash_qla" and front.is_triton, sizes
    assert fallbacks() == []


@pytest.mark.parametrize("bits", [Bits.FREE, Bits.DETERMINISTIC])
def test_no_fallback_is_taken_in_the_shapes_of_the_other_mixers(machine, bits):
    """The rows kda, gdn2, gdp and mamba2 of ``benchmarks/registry.toml``."""
    fallbacks = machine()
    kda = kda_table(kda_layout(HeadSizes(32, 32, 128, 128)))
    gdn2 = gdn2_table(gdn2_layout(HeadSizes(16, 32, 128, 128)))
    mamba2 = mamba2_table(
        Mamba2Dims(
            hidden_size=4096,
            num_heads=128,
            num_groups=8,
            head_dim=64,
            state_dim=128,
            conv_kernel_dim=4,
        ).layout
    )
    rules = [
        choose_kda("auto", kda.state_shape, -5.0, CUDA, BF16, bits).rule,
        choose_gdn2("auto", gdn2.state_shape, CUDA, BF16, bits).rule,
        choose_ssd("auto", mamba2.state_shape, CUDA, BF16, bits).rule,
    ]
    assert [rule.name for rule in rules] == ["fla"] * 3
    for steps in (2, 4):
        sizes = HeadSizes(8, 32, 128, 128)
        gdp_rule = choose_gdp("auto", sizes, steps, CUDA, BF16, bits).rule
        assert gdp_rule.name == "flash_qla"
    gdp = gdp_table(gdp_layout(HeadSizes(8, 32, 128, 128), 4))
    for table in (kda, gdn2, mamba2, gdp):
        assert front_of(table, "cuda", BF16, 4, bits=bits).is_triton
    assert fallbacks() == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"capability": (8, 0)}, "takes a slower rule, 'fla'"),
        ({"flash_qla": None}, "flash-qla is not installed"),
        ({"flash_qla": "0.1.2"}, "computes wrong gradients at times"),
        ({"triton": None}, "conv, gates and norm run in plain torch: triton is not"),
    ],
)
def test_a_fallback_is_in_the_log(machine, changes, told):
    fallbacks = machine(**changes)
    _, front = rule_and_front_of(HeadSizes(16, 32, 128, 128), Bits.FREE)
    assert any(told in message for message in fallbacks()), fallbacks()
    assert isinstance(front, PlainFront) is ("triton" in changes)


def test_flash_qla_runs_on_the_gpus_that_its_refusal_names(machine):
    named = set()
    taken = set()
    for capability in [(a, b) for a in range(7, 13) for b in range(10)]:
        machine(capability)
        refusal = obstacles.why_not_flash_qla(CUDA, BF16, 128, 128)
        if refusal is None:
            taken.add("{}.{}".format(*capability))
        else:
            named.update(re.findall(r"\d+\.\d+", refusal.why))
    assert taken == named == {"9.0", "10.0", "10.3"}


# of each package, the oldest and the newest version beside which a GPU's rule changes
@pytest.mark.parametrize(
    ("package", "why_not", "refused", "taken"),
    [
        ("flash_qla", "why_not_flash_qla_package", ["0.1.2"], ["0.1.3", "0.2.0"]),
        (
            "triton",  # without TileLang
            "why_not_fla_package",
            ["3.4.0", "3.7.0"],
            ["3.3.9", "3.7.1", "4.0.0"],
        ),
        ("fla_core", "why_not_fla_package", ["0.5.9", "0.7.0"], ["0.6.0", "0.6.9"]),
    ],
)
def test_versions_are_refused_and_taken_as_is_said(
    machine, package, why_not, refused, taken
):
    hopper = (9,) if why_not == "why_not_fla_package" else ()
    others = {"tilelang": None} if package == "triton" else {}
    found = {}
    for version in refused + taken:
        machine(**{package: version}, **others)
        found[version] = getattr(obstacles, why_not)(*hopper) is None
    assert found == dict.fromkeys(refused, False) | dict.fromkeys(taken, True)
