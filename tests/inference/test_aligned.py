"""The aligned mixer: training, prefill and decode give a token the same bits, however
it comes."""

import copy
from collections import defaultdict

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_gdn.inference import Memory, decode, prefill
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.generation.aligned import decode_on_grid
from megatron_gdn.ops.readout.base import SplitReadout
from tests.inference.row_mixers import (
    KINDS,
    copied,
    documents_of,
    empty_memory,
    gdn2_kind,
    gdn_kind,
    gdp_kind,
    kda_kind,
    mamba2_kind,
    prefilled,
)

# No multiple of a vector's width, so that elementwise kernels have ends to treat
# otherwise.
assert all(kind.layout.width % 16 and kind.layout.conv_width % 32 for kind in KINDS)

pytestmark = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@pytest.mark.each_pair
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "stages", [(1, 149), (63, 1, 86), (70, -5, 60, -9, 6), (-3, 61, -2, 84)], ids=str
)
def test_any_cut_has_the_bits_of_training(kind, stages, dtype):
    mixer = kind.mixer(dtype, aligned=True)
    rows = kind.rows(150, 2, dtype)
    whole = kind.trained(rows, aligned=True)
    memory = mixer.memory_shape.zeros(2, dtype, rows.device)
    at = 0
    for part in stages:
        run = decode if part < 0 else prefill
        mixed = run(rows[at : at + abs(part)], mixer, memory)
        assert torch.equal(mixed, whole[at : at + abs(part)]), (at, part)
        at += abs(part)
    assert at == 150


def test_neighbours_and_place_change_no_bit(kind):
    rows = kind.rows(150, 1)
    whole = kind.trained(rows, aligned=True)
    lengths = (5, 150, 0, 67)
    packed = torch.cat([kind.rows(5), rows, kind.rows(67)])
    assert torch.equal(kind.trained(packed, lengths, aligned=True)[5:155], whole)
    assert torch.equal(
        kind.trained(torch.cat([kind.rows(150, 3), rows], 1), aligned=True)[:, 3:],
        whole,
    )
    mixer = kind.mixer(aligned=True)
    given = [0, 0, 0]
    memory = empty_memory(mixer, rows, 3)
    for counts in ((70, 3, 0), (0, 60, 9), (80, 87, 1)):
        pieces = [rows[a : a + n] for a, n in zip(given, counts, strict=True)]
        documents = documents_of(counts)
        begins = not any(given)
        mixed = prefill(torch.cat(pieces), mixer, memory, documents, begins=begins)
        for piece, a, n in zip(mixed.split(list(counts)), given, counts, strict=True):
            assert torch.equal(piece, whole[a : a + n])
        given = [a + n for a, n in zip(given, counts, strict=True)]


def test_it_computes_what_the_plain_mixer_computes_forward_and_backward(kind):
    rows = kind.rows(130, 2)
    torch.testing.assert_close(
        kind.trained(rows, aligned=True), kind.trained(rows), rtol=1e-5, atol=1e-5
    )
    gradients = []
    for aligned in (True, False):
        leaf = rows.clone().requires_grad_()
        mixed = kind.trained(leaf, aligned=aligned)
        (mixed * kind.rows(130, 2)[..., : mixed.shape[-1]]).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


WIDE = {
    "gdn": gdn_kind(HeadSizes(3, 9, 40, 56)),
    "gdn2": gdn2_kind(HeadSizes(3, 9, 40, 56)),
    "gdp": gdp_kind(HeadSizes(3, 9, 40, 56), 2),
    "kda": kda_kind(HeadSizes(3, 9, 40, 56)),
    "mamba2": mamba2_kind(8, 2, 72, 40),
}


@pytest.mark.slow
def test_any_cut_has_the_bits_of_training_on_two_threads(kind):
    """Tensors of more than 32768 elements, which torch cuts for its threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        wide = WIDE[kind.name]
        test_any_cut_has_the_bits_of_training(wide, (70, -5, 60, -9, 6), torch.float32)
        test_neighbours_and_place_change_no_bit(wide)
    finally:
        torch.set_num_threads(threads)


class Products(TorchDispatchMode):
    """The shapes and strides of every matrix product, by operation; how often each
    came."""

    NAMES = ("mm", "addmm", "bmm", "baddbmm", "baddbmm_", "linalg_solve_triangular")

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[tuple, int] = defaultdict(int)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in self.NAMES:
            tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            self.seen[str(function), *((x.shape, x.stride()) for x in tensors)] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.each_value
@pytest.mark.parametrize(
    "lanes", [None, 3], ids=["a chunk a call", "three, as on a GPU"]
)
def test_training_prefill_and_decode_take_products_of_the_same_shapes(
    kind, lanes, monkeypatch
):
    if lanes is not None:
        from megatron_gdn.ops.rules import chunk_table

        monkeypatch.setattr(chunk_table, "fills_last_group", lambda device: True)
        monkeypatch.setattr(
            chunk_table, "_PRODUCTS_PER_GROUP", lanes * kind.layout.state_heads
        )
    mixer = kind.mixer(aligned=True)

    def shapes(run) -> set:
        with Products() as products:
            run()
        return set(products.seen)

    def generated(N: int, tokens: int) -> set:
        _, memory = prefilled(mixer, kind.rows(tokens, N))
        return shapes(lambda: decode(kind.rows(1, N), mixer, memory))

    expected = shapes(lambda: kind.trained(kind.rows(65), aligned=True))
    # no state leaves the chunk
    alone = shapes(lambda: kind.trained(kind.rows(1), aligned=True))
    assert alone and alone < expected
    for S, B in ((127, 1), (129, 2)):
        assert (
            shapes(lambda S=S, B=B: kind.trained(kind.rows(S, B), aligned=True))
            == expected
        )
    packed = (5, 0, 200, 64)
    rows = kind.rows(sum(packed))
    assert shapes(lambda: kind.trained(rows, packed, aligned=True)) == expected
    for N, tokens in ((1, 5), (4, 130)):
        assert generated(N, tokens) == expected
    # the wiring of groups; their bits on this CPU are not promised
    if lanes is not None:
        torch.testing.assert_close(
            kind.trained(rows, packed, aligned=True),
            kind.trained(rows, packed),
            rtol=1e-5,
            atol=1e-5,
        )


def test_requests_that_only_pad_a_step_write_nothing(kind):
    """Their slot is -1; another request has slot 0, and no slot is that of a request
    before."""
    mixer = kind.mixer(aligned=True)
    rows = kind.rows(70)
    whole = kind.trained(rows, aligned=True)
    shape = mixer.memory_shape
    conv = torch.zeros(3, *shape.dynamic_context_history)
    states = torch.zeros(3, *shape.state)
    conv[1:] = 1e30
    states[1:] = 1e30
    _, begun = prefilled(mixer, rows[:60])
    for token in (0, 1, 2, *range(60, 70)):  # over the end of a chunk
        if token == 60:
            conv[0] = begun.history[0]
            states[0] = begun.state[0]
        row = rows[token]
        both = torch.cat([row, torch.ones_like(row)])[:, None]
        buffers = Memory(conv, states, torch.tensor([0, -1]))
        out = decode(both.transpose(0, 1), mixer, buffers)[0]
        assert torch.equal(out[0], whole[token][0]) and not out[1].any()
    assert (conv[1:] == 1e30).all() and (states[1:] == 1e30).all()
    strided = Memory(conv.mT.contiguous().mT, states, torch.tensor([0, -1]))
    with pytest.raises(RuntimeError, match="view"):
        decode(both.transpose(0, 1), mixer, strided)


def test_no_product_is_one_that_megatrons_mode_replaces(kind):
    """Its kernels for torch.mm and torch.addmm compute fp32 in TF32, and raise for
    fp64."""
    rows = kind.rows(70).requires_grad_()
    mixer = kind.mixer(aligned=True)
    memory = mixer.memory_shape.zeros(1, torch.float32, rows.device)
    with Products() as products:
        kind.trained(rows, aligned=True).sum().backward()
        decode(kind.rows(1), mixer, memory)
    names = {name for name, *_ in products.seen}
    assert names and not names & {"aten.mm.default", "aten.addmm.default"}, names


def test_a_step_of_many_sequences_is_one_call_of_the_rule(kind, monkeypatch):
    mixer = kind.mixer(aligned=True)
    memory = mixer.memory_shape.zeros(5, torch.float32, torch.device("cpu"))
    calls = []
    begin = type(mixer.rule).begin

    def counted(self, inputs, documents):
        calls.append(inputs[0].shape)
        return begin(self, inputs, documents)

    monkeypatch.setattr(type(mixer.rule), "begin", counted)
    memory.history[:, 0, 0] = torch.tensor([0, 1, 63, 0, 8])
    decode(kind.rows(1, 5), mixer, memory)
    assert [shape[:2] for shape in calls] == [(5, 64)]


def test_a_step_in_place_writes_its_row_and_the_states_of_chunks_that_end(kind):
    """And has the bits of training; what lies behind a sequence's last row has no
    meaning."""
    mixer = kind.mixer(aligned=True)
    rows = kind.rows(140, 3)
    tokens = [63, 5, 127]
    whole = kind.trained(rows, aligned=True)
    memory = mixer.memory_shape.zeros(3, rows.dtype, rows.device)
    for tensor in memory[:2]:
        tensor.normal_()
    for n, had in enumerate(tokens):
        _, begun = prefilled(mixer, rows[:had, n : n + 1])
        memory.history[n, : 4 + had % 64] = begun.history[0, : 4 + had % 64]
        memory.state[n] = begun.state[0]
    for step in range(3):
        before = copied(memory)
        at = [had + step for had in tokens]
        row = torch.stack([rows[place, n] for n, place in enumerate(at)])[None]
        mixed = decode_on_grid(row, mixer, memory)
        for n, place in enumerate(at):
            assert torch.equal(mixed[0, n], whole[place, n])
            before[0][n, 4 + place % 64] = rows[place, n]
            before[0][n, 0, 0] = (place + 1) % 64
            if place % 64 == 63:
                before[0][n, 1:4] = before[0][n, 65:]
                _, begun = prefilled(mixer, rows[: place + 1, n : n + 1])
                before[1][n] = begun.state[0]
        assert all(map(torch.equal, memory[:2], before[:2]))


def test_tables_are_made_on_the_host_whatever_the_default_device_is(kind):
    """``torch.device("meta")`` stands for a GPU; what comes up there has no values."""
    rows = kind.rows(70, 2)
    mixer = kind.mixer(aligned=True)
    found = []
    for device in ("cpu", "meta"):
        memory = mixer.memory_shape.zeros(2, rows.dtype, rows.device)
        with torch.device(device):
            mixed = prefill(rows[:3], mixer, memory)
            more = prefill(rows[3:], mixer, memory)
        found.append((mixed, more, memory.history, memory.state))
    for here, there in zip(*found, strict=True):
        assert torch.equal(here, there)


def test_a_readout_by_row_or_by_a_module_reads_the_new_rows_alone(kind):
    """Such readouts give a row the same bits whatever stands beside it."""
    rows = kind.rows(70, 3)
    mixer = kind.mixer(aligned=True)
    plain = mixer.readout
    read = []

    class ByRow(type(plain)):
        is_rowwise = True

        def forward(self, o, rows, gamma, **more):
            read.append(rows.shape[:2])
            return super().forward(o, rows, gamma, **more)

    is_rowwise = copy.copy(plain)
    object.__setattr__(is_rowwise, "__class__", ByRow)
    by_module = SplitReadout(is_rowwise, lambda mixed, _: mixed)
    expected = None
    for readout in (plain, is_rowwise, by_module):
        memory = mixer.memory_shape.zeros(3, rows.dtype, rows.device)
        noted = mixer._replace(readout=readout)
        read.clear()
        mixed = torch.cat(
            [prefill(rows[:69], noted, memory), decode(rows[69:], noted, memory)]
        )
        if readout is plain:
            expected = mixed
        else:
            assert read == [(69, 3), (1, 3)]
        torch.testing.assert_close(mixed, expected, rtol=1e-6, atol=1e-6)
