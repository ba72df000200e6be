"""In deterministic mode each kernel of fla's has one configuration, and fla is chosen
only where a test saw bits repeat."""

import threading
import weakref

import pytest
import torch

from megatron_gdn.gdn.flash_qla.rule import FlashQlaRule
from megatron_gdn.gdn.rule import FlaGDN, resolve_rule
from megatron_gdn.gdn2.rule import FlaGDN2, choose_gdn2
from megatron_gdn.kda.rule import FlaKDA, choose_kda
from megatron_gdn.mamba2.rule import FlaSSD, choose_ssd
from megatron_gdn.ops.delta_rule.base import HeadSizes, RuleInputs
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.obstacles import Obstacle
from megatron_gdn.ops.rules import fla_configurations, repeatable
from megatron_gdn.ops.rules.base import Bits
from megatron_gdn.ops.rules.fla import ChunkProducts, FlaRule
from megatron_gdn.ops.rules.fla_configurations import (
    FIXED_CONFIGURATIONS,
    Configuration,
    without_autotuning,
)
from megatron_gdn.ops.state_maps.state_map import StateShape

pytest.importorskip("fla")

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
TESTED = {"flash-linear-attention": "0.6.0", "triton": "3.6.0", "tilelang": "0.1.15"}


@pytest.fixture(scope="module")
def tuned():
    """The kernels of fla's, once the modules of all rules are imported."""
    for rule in (FlaGDN, FlaGDN2, FlaKDA, FlaSSD):
        _ = rule().fla
    return fla_configurations.tuned_kernels()


def lists(tuned):
    return [kernel.configs for kernel, _, _ in tuned]


def test_inside_the_block_no_kernel_has_a_choice(tuned):
    before = lists(tuned)
    assert max(map(len, before)) > 1
    with without_autotuning():
        assert {len(configurations) for configurations in lists(tuned)} == {1}
    assert lists(tuned) == before


def test_an_error_inside_gives_the_lists_back(tuned):
    before = lists(tuned)
    with pytest.raises(ZeroDivisionError), without_autotuning():
        _ = 1 // 0
    assert lists(tuned) == before


def test_a_thread_that_leaves_gives_no_list_back_to_one_that_is_inside(tuned):
    inside, seen = threading.Event(), []

    def other():
        with without_autotuning():
            inside.set()

    with without_autotuning():
        thread = threading.Thread(target=other)
        thread.start()
        inside.wait(0.2)
        seen = lists(tuned)
    thread.join()
    assert inside.is_set() and {len(configurations) for configurations in seen} == {1}


# Of these fla lists larger tiles and more stages where it finds a GPU with Hopper's
# shared memory.
LISTED_BY_GPU = {
    "chunk_bwd_kernel_dh",
    "chunk_fwd_kernel_h",
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64",
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
    "chunk_kda_bwd_kernel_wy_dqkg_fused",
}


def test_what_is_fixed_is_in_flas_own_list(tuned):
    """Else the kernel would run in its first configuration, without a word."""
    for kernel, (entry,), timed in tuned:
        name = kernel.base_fn.__name__
        fixed = FIXED_CONFIGURATIONS.get(name)
        if fixed is None:
            assert entry is timed[0]
            continue
        assert fixed.warps in (1, 2, 4, 8) and fixed.stages in (1, 2, 3, 4), name
        if not torch.cuda.is_available() and name in LISTED_BY_GPU:
            continue
        found = Configuration(entry.num_warps, entry.num_stages, entry.kwargs)
        assert found == fixed, name


def test_each_kernel_that_is_listed_is_one_of_flas(tuned):
    assert FIXED_CONFIGURATIONS.keys() <= {
        kernel.base_fn.__name__ for kernel, _, _ in tuned
    }


def test_a_listed_configuration_is_taken_from_flas_own_list(tuned):
    for kernel, fixed, timed in tuned:
        assert fixed[0] in timed
        wanted = FIXED_CONFIGURATIONS.get(kernel.base_fn.__name__)
        found = [c.kwargs | {"w": c.num_warps, "s": c.num_stages} for c in timed]
        if wanted and wanted.tiles | {"w": wanted.warps, "s": wanted.stages} in found:
            assert fixed[0].num_warps == wanted.warps, kernel.base_fn.__name__
            assert fixed[0].kwargs == wanted.tiles, kernel.base_fn.__name__


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(repeatable, "installed_version", TESTED.get)
    for rule in (FlaGDN, FlaGDN2, FlaKDA, FlaSSD):
        monkeypatch.setattr(rule, "why_not", lambda *_: None)
    monkeypatch.setattr(FlashQlaRule, "why_not", lambda *_: Obstacle("not here"))
    return monkeypatch


def gdn(backend, bits, columns=128):
    sizes = HeadSizes(2, 4, 128, columns)
    return resolve_rule(backend, device=CUDA, dtype=BF16, sizes=sizes, bits=bits)


def gdn2(backend, bits, columns=128):
    return choose_gdn2(backend, StateShape(4, 128, columns), CUDA, BF16, bits)


def kda(backend, bits, columns=128):
    return choose_kda(backend, StateShape(4, 128, columns), -5.0, CUDA, BF16, bits)


def mamba2(backend, bits, columns=64):
    state = StateShape(4, 128, columns, diagonal=True)
    return choose_ssd(backend, state, CUDA, BF16, bits)


@pytest.mark.parametrize("choice", [gdn, gdn2, kda, mamba2])
def test_deterministic_auto_takes_fla_where_its_bits_were_seen_to_repeat(h200, choice):
    rule, reason = choice("auto", Bits.DETERMINISTIC)
    assert rule.name == "fla" and rule.bits is Bits.DETERMINISTIC
    assert rule.batch_invariant
    assert choice is gdn or "were equal on an H200" in reason
    assert choice("auto", Bits.FREE).rule.bits is Bits.FREE


@pytest.mark.parametrize("choice", [gdn, gdn2, kda, mamba2])
@pytest.mark.parametrize("change", ["GPU", "version", "dims"])
def test_elsewhere_it_takes_the_plain_rule_and_a_name_is_told(h200, choice, change):
    columns = {}
    if change == "GPU":
        h200.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    elif change == "version":
        h200.setattr(repeatable, "installed_version", (TESTED | {"triton": "3.7"}).get)
    else:
        columns = {"columns": 256}
    rule, reason = choice("auto", Bits.DETERMINISTIC, **columns)
    assert isinstance(rule, PlainRule)
    assert "not fla: fla was not tested for repeatability" in reason
    named = choice("fla", Bits.DETERMINISTIC, **columns)
    assert named.rule.name == "fla" and "was not tested" in named.reason
    assert named.rule.bits is Bits.DETERMINISTIC


@pytest.mark.parametrize("choice", [gdn, gdn2, kda, mamba2])
def test_fla_is_not_taken_on_the_grid(h200, choice):
    assert isinstance(choice("auto", Bits.ON_GRID).rule, PlainRule)
    with pytest.raises(ValueError, match=r"takes kernels whose\s+bits were tested"):
        choice("fla", Bits.ON_GRID)


LAST = torch.ones(1)  # in place of final states


class Listening(FlaRule):
    """A rule whose six methods note whether each kernel has one configuration."""

    def __init__(self, bits, tuned):
        super().__init__(bits)
        self.tuned = tuned
        self.fixed = {}
        self.products = []

    def note(self, method):
        self.fixed[method] = {len(of) for of in lists(self.tuned)} == {1}

    def chunk_products(self, x):
        self.note("chunk_products")
        made = x.inputs.k.clone()
        self.products.append(weakref.ref(made))
        return ChunkProducts({}, (made,))

    def pass_states(self, x, made, initial, final):
        self.note("pass_states")
        return None, None, LAST

    def output(self, x, made, states, written):
        self.note("output")
        return x.inputs.v

    def state_map(self, x, made):
        self.note("state_map")

    def d_states(self, x, any_states):
        self.note("d_states")

    def gradients(self, x, initial, d_final):
        self.note("gradients")
        return x.inputs


@pytest.mark.parametrize("bits", [Bits.FREE, Bits.DETERMINISTIC])
def test_a_rule_runs_each_method_in_its_configurations(tuned, bits):
    x = torch.zeros(1, 3, 2, 4)
    inputs = RuleInputs(x, x, x, x, x)
    rule = Listening(bits, tuned)
    rule.begin(inputs, None).state_map()
    _, last, saved = rule.begin(inputs, None).run()
    assert last is LAST and saved.tensors[0] is rule.products[-1]()
    forward = rule.begin(inputs, None)
    assert not forward.run(keep=False).saved.tensors and rule.products[-1]() is None
    backward = rule.begin_backward(x, inputs, saved, None)
    backward.d_initial()
    backward.run()
    methods = (
        "chunk_products",
        "state_map",
        "pass_states",
        "output",
        "d_states",
        "gradients",
    )
    assert rule.fixed == dict.fromkeys(methods, bits is not Bits.FREE)
