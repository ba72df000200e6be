"""Chunks are inverted by blocks and computed in groups, which is not seen in the
results."""

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_gdn.ops import recurrent_gated_delta_rule
from megatron_gdn.ops import torch_chunk_gated_delta_rule as chunk_rule
from megatron_gdn.ops.delta_rule import plain, triangular
from megatron_gdn.ops.delta_rule.base import RuleInputs
from megatron_gdn.ops.delta_rule.chunk_math import (
    ChunkValues,
    _products_per_channel,
    _products_per_head,
)
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.delta_rule.triangular import _identity_and_corners
from megatron_gdn.ops.rules import chunk_table
from megatron_gdn.ops.static_documents import StaticDocuments
from megatron_gdn.ops.switches import full_fp32_matmul
from tests import filled_memory
from tests.live_tensors import LiveBytes

from .states import backward_of, documents_of
from .test_gated_delta_rule import (
    FP32,
    NAMES,
    OFFSETS,
    assert_agree,
    make_inputs,
    outputs_and_gradients,
)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Groups of two chunks, filled up, and the ways through that a GPU takes."""
    monkeypatch.setattr(chunk_table, "chunks_at_once", lambda heads: 2)
    monkeypatch.setattr(chunk_table, "fills_last_group", lambda device: True)
    monkeypatch.setattr(
        triangular, "_invert_by_substitution", triangular._invert_by_growing_blocks
    )


@pytest.mark.each_value
@pytest.mark.parametrize("decay", [0.0, 1.0, 16.0])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_groups_agree_with_the_recurrence(as_on_a_gpu, packed, decay):
    batch, sequences, offsets = (1, 6, OFFSETS) if packed else (3, 3, None)
    inputs = make_inputs(batch, 300, 3, 6, 16, 8, decay, sequences, torch.float32)
    wide = [x.double() for x in inputs]
    expected = outputs_and_gradients(recurrent_gated_delta_rule, wide, offsets)
    assert_agree(outputs_and_gradients(chunk_rule, inputs, offsets), expected, FP32)


@pytest.mark.parametrize("heads", [16, 32, 64])
def test_a_few_documents_add_no_group_to_a_full_buffer(heads):
    """Each may add a chunk to the 512 of 2^15 tokens."""
    at_once = chunk_table.chunks_at_once(heads)
    assert -(-512 // at_once) == -(-(512 + 15) // at_once)


@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("fixed", [False, True], ids=["documents", "fixed buffers"])
def test_the_state_that_leaves_a_group_keeps_no_other_in_memory(fixed, back):
    """A backward keeps the state before each group."""
    documents = StaticDocuments(300, 2) if fixed else documents_of((300,))
    table = chunk_table.ChunkTable.of(documents, 64, heads=2)
    (group,) = table.groups
    n, N = table.chunks_in(group), documents.sequences
    through, states = torch.ones(n, 2, 3, 1), torch.ones(n + 1, 2, 3, 4)
    passed = group.pass_states(through, states, None, torch.ones(N, 2, 3, 4), back)
    carried = passed.carried_state
    assert carried.untyped_storage().nbytes() == carried.nbytes == 2 * 3 * 4 * 4


@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
def test_a_group_begins_when_the_one_before_is_freed(as_on_a_gpu, monkeypatch, back):
    """But the states that it passes on, of fewer bytes than its output."""
    q, k, v, g, beta = make_inputs(1, 6 * 64, 2, 2, 4, 8, 1.0, 1, torch.float32)[:5]
    inputs = RuleInputs(q, k, v, g, beta)
    held = []
    run_group = plain.run_group

    def watched(*args, **kwargs):
        held.append(live.now)
        return run_group(*args, **kwargs)

    rule = PlainRule()
    saved = rule.begin(inputs, None).run().saved
    monkeypatch.setattr(plain, "run_group", watched)
    with LiveBytes() as live:
        if back:
            rule.begin_backward(torch.randn_like(v), inputs, saved, None).run()
        else:
            rule.begin(inputs, None).run()
    held = held[-3:]  # a backward passes states through the groups first
    of_group = v.nbytes // 3
    assert max(held) - min(held) < of_group, held


class Launches(TorchDispatchMode):
    """Counts the operations that write memory: what a GPU launches at least one kernel
    for."""

    ALLOCATE = ("empty", "new_empty", "empty_like", "detach", "_unsafe_view")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        views = any(
            r.alias_info and not r.alias_info.is_write for r in function._schema.returns
        )
        name = function.overloadpacket.__name__
        self.count += not views and name not in self.ALLOCATE
        return function(*args, **(kwargs or {}))


def test_a_gpu_walks_in_one_launch_per_chunk_and_documents_cost_none(
    as_on_a_gpu, monkeypatch
):
    """The host must stay ahead of the device: 16 chunks in one group, in one sequence
    or 16."""
    chunks = 16
    C = 64
    monkeypatch.setattr(chunk_table, "chunks_at_once", lambda heads: chunks)
    # The tests' own filling of new memory is no launch of a rule.
    monkeypatch.setattr(filled_memory, "fill", lambda x: None)
    q, k, v, g, beta, _ = make_inputs(
        1, chunks * C, 1, 2, 4, 4, 1.0, dtype=torch.bfloat16
    )

    def launches(lengths):
        state = torch.zeros(len(lengths), 2, 4, 4)
        counted = []
        rule = PlainRule()
        inputs = RuleInputs(q, k, v, g, beta)
        documents = documents_of(lengths)
        begun = rule.begin(inputs, documents)
        back = backward_of(rule, inputs, v, begun.run(state).saved, documents)
        for run in (
            lambda: begun.run(state, final=True),
            lambda: back.run_with_d_initial(state, state, begun.state_map),
        ):
            run()  # makes the tables
            with Launches() as seen:
                run()
            counted.append(seen.count)
        return counted

    forward, backward = launches((chunks * C,))
    assert forward <= 80 + chunks and backward <= 134 + 2 * chunks, (forward, backward)
    assert launches((C,) * chunks) == [forward, backward]


@pytest.fixture
def switches():
    """torch's precision switches as nobody has touched them, before and after."""

    def untouched():
        torch.set_float32_matmul_precision("highest")
        torch.backends.fp32_precision = "none"
        for switch in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
            switch.fp32_precision = "none"

    untouched()
    yield torch.backends
    untouched()


@pytest.mark.parametrize("precision", ["high", "medium", "highest"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_who_uses_torchs_old_switches_can_read_them_inside_and_has_them_back(
    switches, device, precision
):
    """torch refuses to read an old switch that a new one contradicts."""

    def state():
        return (
            torch.get_float32_matmul_precision(),
            switches.cuda.matmul.allow_tf32,
            switches.cuda.matmul.fp32_precision,
            switches.mkldnn.matmul.fp32_precision,
        )

    torch.set_float32_matmul_precision(precision)
    if device == "cuda":
        # each device's has its own value
        switches.mkldnn.matmul.fp32_precision = "ieee"
    before = state()
    with full_fp32_matmul(device):
        inside = state()
    assert state() == before
    if device == "cuda":
        assert inside[:2] == ("highest", False) and inside[2] not in ("tf32", "bf16")
        assert inside[3] == before[3]
    else:
        assert inside == (*before[:3], "ieee")


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_no_thread_turns_the_switches_back_under_another(switches, device, precision):
    """The first thread leaves while the second is inside: autograd's thread beside the
    main one."""
    switch = switches.cuda.matmul if device == "cuda" else switches.mkldnn.matmul
    torch.set_float32_matmul_precision(precision)
    before = switch.fp32_precision
    entered = threading.Event()
    left = threading.Event()

    def first():
        with full_fp32_matmul(device):
            entered.set()
            assert left.wait(60)

    thread = threading.Thread(target=first)
    thread.start()
    assert entered.wait(60)
    with full_fp32_matmul(device):
        left.set()
        thread.join()
        assert switch.fp32_precision not in ("tf32", "bf16")
    assert switch.fp32_precision == before
    assert torch.get_float32_matmul_precision() == precision


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_switch_that_follows_the_general_one_still_does_afterwards(switches, device):
    switch = switches.cuda.matmul if device == "cuda" else switches.mkldnn.matmul
    switches.fp32_precision = "tf32"
    with full_fp32_matmul(device):
        assert switch.fp32_precision == "ieee"
    assert switch.fp32_precision == "tf32"
    switches.fp32_precision = "ieee"
    assert switch.fp32_precision == "ieee"
    switch.fp32_precision = "tf32"  # its own value
    with pytest.raises(KeyError), full_fp32_matmul(device):
        assert switch.fp32_precision == "ieee"
        raise KeyError
    assert switch.fp32_precision == "tf32"


def test_the_rule_has_the_same_bits_whatever_precision_the_model_asks_for(switches):
    inputs = make_inputs(1, 70, 1, 2, 16, 16, 1.0, dtype=torch.float32)
    plain = outputs_and_gradients(chunk_rule, inputs)
    # of which a CPU with bf16 products makes use
    torch.set_float32_matmul_precision("medium")
    switched = outputs_and_gradients(chunk_rule, inputs)
    for name in NAMES:
        assert torch.equal(plain[name], switched[name]), name


EPS = torch.finfo(torch.float32).eps
WAYS = {
    "whole": triangular.unit_lower_inverse,
    "growing blocks": triangular._invert_by_growing_blocks,
    "substitution": triangular._invert_by_substitution,
}


def random_lower(C, scale):
    torch.manual_seed(C)
    return (torch.randn(3, 2, C, C, dtype=torch.float64) * scale).tril(-1)


def repeated_key(C, beta):
    return (beta * torch.ones(1, C, C, dtype=torch.float64)).tril(-1)


def exact_inverse(L):
    identity = torch.eye(L.shape[-1], dtype=L.dtype).expand(L.shape)
    return torch.linalg.solve_triangular(L, identity, upper=False, unitriangular=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("C", [1, 2, 3, 7, 16, 20, 33, 64, 100])
def test_the_inverse_is_exact_in_fp64(way, C):
    L = random_lower(C, 0.2)
    expected = exact_inverse(L)
    actual = WAYS[way](L)
    assert actual.is_contiguous()
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=1e-12 * expected.abs().max().item()
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "L", [repeated_key(64, 1.0), repeated_key(64, 0.5), repeated_key(64, 1.9)]
)
def test_a_key_that_repeats_costs_no_digits(way, L):
    """|X - X'| <= c u |X| |I + L| |X|; c counts roundings in a row, C in each of 6
    levels."""
    exact = exact_inverse(L)
    error = (WAYS[way](L.float()).double() - exact).abs()
    identity = torch.eye(64, dtype=torch.float64)
    bound = 64 * 6 * EPS / 2 * (exact.abs() @ (identity + L).abs() @ exact.abs())
    assert (error <= bound + 1e-30).all(), (error / bound).max()


def test_masks_of_the_inverse_lie_where_they_are_used():
    masks = _identity_and_corners(16, torch.float64, torch.device("meta"))
    assert {(x.dtype, x.device.type) for x in masks} == {(torch.float64, "meta")}


def test_masks_of_the_inverse_serve_training_after_an_evaluation():
    with torch.inference_mode():
        masks = _identity_and_corners(17, torch.float64, torch.device("cpu"))
    assert not any(x.is_inference() for x in masks)


@pytest.mark.parametrize("channels", [False, True], ids=["per head", "per channel"])
def test_no_strength_is_a_strength_of_one(channels):
    """Of the key that reads what is erased; every product of a group."""
    torch.manual_seed(0)
    q, k, e, u = torch.randn(4, 2, 8, 6, dtype=torch.float64)
    g = -torch.rand((2, 8, 6) if channels else (2, 8), dtype=torch.float64)
    given = ChunkValues(q, k, e, u, g)
    products = _products_per_channel if channels else _products_per_head
    ones = given._replace(strength=torch.ones(2, 8, dtype=torch.float64))
    for x, y in zip(products(given, True), products(ones, True), strict=True):
        assert torch.equal(x, y)
