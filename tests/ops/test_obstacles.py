"""Every requirement of the installed fla is checked when a rule is chosen."""

import pytest
import torch

from megatron_gdn.gdn.rule import resolve_rule
from megatron_gdn.ops import obstacles
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.obstacles import log_obstacle_once
from megatron_gdn.ops.rules import fla

fla_chunk = pytest.importorskip("fla.ops.gated_delta_rule.chunk")
SIZES = HeadSizes(2, 4, 64, 64)


@pytest.fixture
def ampere(monkeypatch):
    """An A100, and nothing remembered of earlier looks at the packages."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    caches = (
        obstacles.why_not_fla_package,
        obstacles._needs_tilelang,
        fla._functions_of,
        log_obstacle_once,
    )
    for cached in caches:
        cached.cache_clear()
    yield monkeypatch
    for cached in caches:
        cached.cache_clear()


def installed(monkeypatch, versions):
    known = obstacles.installed_version
    made = lambda name: versions[name] if name in versions else known(name)  # noqa: E731
    monkeypatch.setattr(obstacles, "installed_version", made)


def choose(name, dtype=torch.bfloat16):
    return resolve_rule(name, device="cuda", dtype=dtype, sizes=SIZES, operands="bf16")


def refused(why):
    """``auto`` passes fla over and says why; asked for by name it raises."""
    choice = choose("auto")
    assert choice.rule.name == "reference" and why in choice.reason
    with pytest.raises(ImportError) as error:
        choose("fla")
    assert why in str(error.value)


def test_the_installed_fla_is_taken(ampere):
    assert choose("auto").rule.name == "fla"


@pytest.mark.parametrize("package", ["flash-linear-attention", "fla-core"])
@pytest.mark.parametrize("version", ["0.5.0", "0.7.0", "1.6.0"])
def test_another_version_is_refused(ampere, package, version):
    installed(ampere, {package: version})
    refused(f"{package} {version} is not supported, 0.6 is")


def test_an_fla_without_a_version_is_refused(ampere):
    installed(ampere, {"flash-linear-attention": None, "fla-core": None})
    refused("fla carries no version")


def test_what_is_not_installed_is_named(ampere):
    installed(ampere, {"triton": None})
    refused("flash-linear-attention needs triton, which is not installed")
    obstacles.why_not_fla_package.cache_clear()
    ampere.setattr(obstacles, "find_spec", lambda name: None)
    refused("flash-linear-attention is not installed (pip install")


def test_an_argument_that_is_gone_is_seen_before_the_first_forward(ampere):
    ampere.setattr(
        fla_chunk, "chunk_fwd_o", lambda q, k, v, h, g, scale, cu_seqlens: None
    )
    refused(
        "chunk_fwd_o of fla.ops.gated_delta_rule.chunk has no argument chunk_indices"
    )


def test_a_function_that_is_gone_is_seen_before_the_first_forward(ampere):
    ampere.delattr(fla_chunk, "recompute_w_u_fwd")
    refused("has no recompute_w_u_fwd")


@pytest.mark.parametrize(
    ("major", "triton", "takes_fla"),
    [
        (9, "3.3.1", True),
        (9, "3.4.0", False),
        (9, "3.7.0", False),
        (9, "3.7.1", True),
        (8, "3.7.0", True),
    ],
)
def test_hopper_with_a_triton_that_miscompiles_needs_tilelang(
    ampere, major, triton, takes_fla
):
    ampere.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, 0))
    ampere.setattr(
        obstacles, "find_spec", lambda name: None if name == "tilelang" else object()
    )
    installed(ampere, {"triton": triton})
    ampere.setattr(
        obstacles, "why_not_flash_qla_package", lambda: obstacles.Obstacle("not here")
    )
    if takes_fla:
        assert choose("auto").rule.name == "fla"
    else:
        refused("install tilelang")


def test_packages_are_advised_where_one_is_missing_and_the_plain_rule_runs_on_a_gpu():
    missing = obstacles.Obstacle("not installed", ImportError)
    too_wide = obstacles.Obstacle("heads are too wide")
    for device, skipped, advised in (
        ("cuda", [missing, too_wide], True),
        ("cuda", [too_wide, None], False),
        ("cpu", [missing], False),
    ):
        assert bool(obstacles.advice_about_plain_rule(device, *skipped)) == advised


def test_versions_are_compared_by_their_leading_numbers():
    assert obstacles.version_tuple("3.7.1rc1+cu130") == (3, 7, 1)
    assert obstacles.version_tuple("0.6.0.dev3") == (0, 6, 0)
    assert obstacles.version_tuple("0.6rc2") == (0, 6)
    assert obstacles.version_tuple("0.6.dev3") == (0, 6, 0)
