"""Offsets and grids of every Triton kernel at sizes beyond 32 bits, in Triton's
interpreter.

Tensors are on the meta device, so their size costs nothing; :mod:`.simulated` runs some
programs.
"""

import ast
import inspect
import mmap
import pkgutil
import re
from importlib import import_module
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpretedFunction

import megatron_gdn
from megatron_gdn.context_parallel.headwise import pack
from megatron_gdn.context_parallel.headwise.shares import HeadShares
from megatron_gdn.gdn import half_kernels
from megatron_gdn.gdn.front import gdn_table
from megatron_gdn.gdn.rule import FlaGDN
from megatron_gdn.kda.front import kda_table
from megatron_gdn.kda.sizes import kda_layout
from megatron_gdn.ops.delta_rule.base import HeadSizes, RuleInputs
from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.front.history import History, HistoryTable
from megatron_gdn.ops.front.history_kernels import (
    add_rows,
    lead_in,
    lead_in_backward,
)
from megatron_gdn.ops.front.launches import TritonFront
from megatron_gdn.ops.generation.memory import Memory
from megatron_gdn.ops.generation.step_kernels import (
    decode_token_in_slots,
    write_slots_on_gpu,
)
from megatron_gdn.ops.kernels.launch import Launch
from megatron_gdn.ops.kernels.reduce import sum_rows
from megatron_gdn.ops.kernels.tiles import FrontTile, norm_backward_tile
from megatron_gdn.ops.readout.base import PlainReadout
from megatron_gdn.ops.readout.kernels import TritonReadout
from megatron_gdn.ops.state_maps import chains_kernels
from tests.kernels.kernel_cases import assert_close
from tests.processes import ROOT

from .simulated import Simulation

META = torch.device("meta")
BF16 = torch.bfloat16
FP32 = torch.float32
INT32 = torch.int32
TAPS = 4
BOTH = "forward", "backward"


def tensor(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device=META)


@pytest.fixture
def simulation(monkeypatch):
    made = Simulation()
    monkeypatch.setattr(
        InterpretedFunction, "run", lambda self, *a, **k: made.run(self, *a, **k)
    )
    # a program runs one tile
    monkeypatch.setattr(pack, "_program_count", lambda tiles, *_: tiles)
    return made


def run_readout(S, B, P, H, V, groups=None, passes=BOTH):
    """The passes of a readout whose gate has the last columns of a row."""
    readout = TritonReadout(slice(P - H * V, P), "silu", 1e-5, groups=groups)
    o = tensor(B, S, H, V)
    proj = tensor(S, B, P)
    gamma = tensor(V if groups is None else H * V)
    if "forward" in passes:
        readout.forward(o, proj, gamma, out=tensor(S, B, H * V))
    if "backward" in passes:
        readout.backward(tensor(S, B, H * V), o, proj, gamma, tensor(S, B, P))


def run_front(
    simulation,
    S,
    B,
    table,
    channels=False,
    packed=False,
    history=0,
    tile=None,
    width=None,
    passes=BOTH,
    gate_rows=False,
):
    """The passes of a front, whose rows lie ``width`` apart; ``history``: how many
    pieces begin at the last tokens and have rows before them; ``gate_rows``: the gates
    have rows of their own."""
    front = TritonFront(table, tile=tile)
    layout = table.layout
    documents = None
    if packed:
        documents = Documents((0, S // 2, S), META)
        simulation.holds(documents.position_T, TAPS)
    C = layout.conv_width
    H = table.state_shape.heads
    K = table.state_shape.rows
    rows, d_rows = (
        tensor(S, B, width or layout.width)[..., : layout.width] for _ in range(2)
    )
    of_gates = ()
    if gate_rows:
        of_gates = (tensor(S, B, layout.width - layout.main_width),)
    before = None
    if history:
        R = history * (TAPS - 1)
        table_of_rows = HistoryTable(
            simulation.holds(tensor(history, TAPS - 1, dtype=INT32), R - 1),
            simulation.holds(tensor(history, TAPS - 1, dtype=INT32), S - 1),
            simulation.holds(tensor(S, dtype=INT32), R - 1),
            tensor(1, 2, dtype=INT32),
        )
        before = History(tensor(R, B, C), table_of_rows, tensor(R, B, C, dtype=FP32))
    gates = tensor(H, dtype=FP32), tensor(H * K if channels else H, dtype=FP32)
    parameters = tensor(C, 1, TAPS), tensor(C), *gates, *of_gates
    if "forward" in passes:
        front.forward(rows, parameters, documents, history=before)
    if "backward" in passes:
        shapes = [x.shape for x in front.section_outputs for _ in x.names]
        grads = table.inputs_class(*(tensor(B, S, *x, dtype=FP32) for x in shapes))
        front.backward(rows, parameters, grads, d_rows, documents, before)


def run_lead_in(simulation, rows, pieces=1):
    """What the first tokens of ``pieces`` read of ``rows`` before them, and its
    backward."""
    R, B, C = rows.shape
    table = HistoryTable(
        simulation.holds(tensor(pieces, TAPS - 1, dtype=INT32), R - 1),
        tensor(pieces, TAPS - 1, dtype=INT32),
        tensor(4, dtype=INT32),
        tensor(1, 2, dtype=INT32),
    )
    history = History(rows, table, tensor(R, B, C, dtype=FP32))
    weight = tensor(C, 1, TAPS)
    lead, _ = lead_in(history, weight)
    partial = tensor(pieces * B, TAPS * C, dtype=FP32)
    lead_in_backward(history, weight, lead, partial)


def run_decode(simulation, N, slots, sizes, transposed=False):
    """A step of N sequences whose memory is in the last of ``slots``."""
    table = gdn_table(sizes.layout)
    H, C = sizes.value_heads, table.layout.conv_width
    state = tensor(slots, H, sizes.key_dim, sizes.value_dim, dtype=FP32)
    if transposed:
        state = tensor(slots, H, sizes.value_dim, sizes.key_dim, dtype=FP32).mT
    memory = Memory(
        tensor(slots, C, TAPS),
        state,
        simulation.holds(tensor(N, dtype=INT32), slots - 1),
    )
    parameters = (
        tensor(C, 1, TAPS),
        tensor(C),
        tensor(H, dtype=FP32),
        tensor(H, dtype=FP32),
    )
    row = tensor(1, N, table.layout.width)
    decode_token_in_slots(row, TritonFront(table), parameters, memory, memory)
    write_slots_on_gpu(
        memory.state, memory.slots, tensor(N, *state.shape[1:], dtype=FP32)
    )


def run_chains(simulation, N, P, H, K, V, composed=False):
    """Chains of two steps over P maps, whose states go to the last of P places."""
    table = simulation.holds(tensor(N, 2, 2, dtype=INT32), P - 1)
    local = tensor(P, H, K, V, dtype=FP32)
    through = tensor(P, H, K, K, dtype=FP32).mT
    out = tensor(P, H, K, V + (K if composed else 0), dtype=FP32)
    start = None if composed else tensor(N, H, K, V, dtype=FP32)
    flags = tensor(2, dtype=INT32)
    chains_kernels.follow_chains_on_gpu(
        local, through, table, out, start, flags, compose=composed
    )


def run_half(B, S, G, H, V):
    x = tensor(B, S, H, V)
    half, up, _ = half_kernels.to_half(x, G, 0)
    half_kernels.lower_powers(half, up, tensor(B, H, 128, V, dtype=FP32), G, 0)


def run_exchange(simulation, s, B, shares, rank=None):
    """All copies of a head exchange of ``rank``; None: of the last but one."""
    if rank is None:
        rank = shares.rank_count - 2
    S = s * shares.rank_count
    whole = tensor(s, B, shares.width)
    full = tensor(S, B, shares.rank_width)
    messages = tensor(shares.rank_count - 1, s, B, shares.rank_width)
    own = simulation.holds(tensor(s, dtype=INT32), S - 1)
    peers = simulation.holds(tensor(S - s, dtype=INT32), S - 1)
    pack.pack_peers(whole, messages, shares, rank)
    pack.pack_peers(whole, messages, shares, rank, kept_rows=(full, own))
    pack.copy_kept_rows(whole, full, shares, rank, own, to_hp=True)
    pack.move_rows(messages, full, peers, to_hp=True)
    pack.unpack_peers(messages, full, whole, shares, rank, own, with_kept_rows=True)


def run_additions(simulation, M, most, tokens, B, C, width=None):
    """M tokens get up to ``most`` gradients each, of the last of ``tokens`` returned
    rows; the tokens' own lie ``width`` apart."""
    additions = simulation.holds(tensor(M, 1 + most, dtype=INT32), tokens - 1)
    d_rows = tensor(tokens, B, width or C)[..., :C]
    add_rows(d_rows, tensor(tokens, B, C, dtype=FP32), additions)


GDN = gdn_table(HeadSizes(1, 1, 128, 128).layout)
SMALL = gdn_table(HeadSizes(1, 1, 16, 16).layout)
FEW_STEPS = FrontTile(128, 8, 4)  # the interpreter takes time for each step
TWO_COPIES = HeadShares(4, (256, 256, 512, 4), (2, 2, 1, 1))
# One value head of 128 and one of 16 behind a row of 514 and 546 columns, and Mamba2's
# groups: from these numbers of batch rows on, the last token of a tile lies 2^31
# elements after the first.
LAST_TOKENS = {
    "backward": (128, 32_898, 514, 1, 128),
    "groups": (16, 7_714, 18_560, 128, 64, 8),
    "forward": (256, 15_425, 546, 1, 16),
}
LAWS = {
    **{
        f"readout, {name}": lambda _, sizes=sizes: run_readout(*sizes)
        for name, sizes in LAST_TOKENS.items()
    },
    "readout, one token below": lambda _: run_readout(128, 32_897, 514, 1, 128),
    "readout, 2^31 rows": lambda _: run_readout(2**26 + 3, 1, 1026, 32, 16),
    # 8 MiB a token, and programs of 1024 tokens
    "readout, rows of many groups": lambda _: run_readout(
        1024, 1, 2**22, 2**17 + 512, 16, 2**17 + 512
    ),
    "readout, a wide stride": lambda _: run_readout(64, 60_000, 36_864, 1, 128),
    "readout, many partial sums": lambda _: run_readout(2**17, 64, 96 + 514, 64, 8),
    "front": lambda x: run_front(x, 128, 32_898, GDN),
    "front, many batch rows": lambda x: run_front(
        x, 9, 65_535, SMALL, history=1024, tile=FEW_STEPS, width=2**16
    ),
    "front, history": lambda x: run_front(
        x, 128, 32_898, GDN, history=2, tile=FEW_STEPS
    ),
    # of narrow sections of wide rows
    "lead-in of many batch rows": lambda x: run_lead_in(
        x, tensor(TAPS - 1, 65_535, 2**16)[..., :16]
    ),
    "lead-in of many pieces": lambda x: run_lead_in(
        x, tensor(2**17, 65_535, 16), 2**16
    ),
    "front, packed": lambda x: run_front(
        x, 2**26 - 5, 1, SMALL, packed=True, history=2, tile=FEW_STEPS
    ),
    "front, kda": lambda x: run_front(
        x,
        128,
        32_898,
        kda_table(kda_layout(HeadSizes(1, 1, 128, 128))),
        channels=True,
        tile=FEW_STEPS,
    ),
    "decode": lambda x: run_decode(x, 65_535, 2**20, HeadSizes(2, 4, 128, 128)),
    "decode, wide rows": lambda x: run_decode(
        x, 65_535, 65_535, HeadSizes(65, 130, 128, 128)
    ),
    "decode, transposed": lambda x: run_decode(
        x, 7, 2**20, HeadSizes(1, 1, 16, 80), True
    ),
    "chains": lambda x: run_chains(x, 70_000, 2**20, 3, 24, 40),
    "chains, composed": lambda x: run_chains(
        x, 70_000, 2**20, 3, 128, 128, composed=True
    ),
    "half": lambda _: run_half(3, 4096, 64, 64, 4096),
    "exchange": lambda x: run_exchange(x, 2**15, 129, TWO_COPIES),
    "exchange of many rows": lambda x: run_exchange(x, 2**19, 129, TWO_COPIES, 3),
    "additions": lambda x: run_additions(x, 2**26 + 1, 32, 2**21, 1, 2048),
    "additions to many batch rows": lambda x: run_additions(x, 4, 2, 2**16, 40_000, 16),
    "additions to wide rows": lambda x: run_additions(x, 4, 2, 4, 40_000, 16, 2**16),
    "sums": lambda _: sum_rows(
        tensor(2**23, 1024, dtype=FP32), tensor(1000), tensor(24)
    ),
    "sums of many columns": lambda _: sum_rows(
        tensor(2**23, 40_000, dtype=FP32), tensor(40_000)
    ),
}


@pytest.mark.parametrize("law", LAWS)
def test_every_offset_is_exact(law, simulation):
    LAWS[law](simulation)
    assert simulation.launched


# For tensors with any strides: the call, how many tensors it makes before this one, and
# the numbers of axes along which elements may lie so far apart, and are refused there.
APART = {
    **{
        f"{name} of a readout": (lambda _: run_readout(5, 3, 56, 3, 16), place, 2, 0)
        for place, name in {1: "rows", 3: "out", 4: "d_out", 5: "d_rows"}.items()
    },
    **{
        f"{name} of a front": (
            lambda x: run_front(x, 12, 3, SMALL, tile=FEW_STEPS, gate_rows=True),
            place,
            2,
            0,
        )
        for place, name in enumerate(("rows", "d_rows", "gate rows"))
    },
    "rows of a history": (lambda x: run_lead_in(x, tensor(4, 3, 3)), 0, 2, 1),
    "gradients of a history": (lambda x: run_additions(x, 4, 2, 4, 3, 16), 1, 2, 0),
    "rows of an exchange": (lambda x: run_exchange(x, 4, 3, TWO_COPIES), 0, 2, 0),
    **{
        f"{name} of chains": (
            lambda x: run_chains(x, 3, 3, 3, 16, 16),
            place,
            2,
            1 + (name == "through"),
        )
        for place, name in enumerate(("local", "through", "out", "start"), 1)
    },
}


@pytest.mark.parametrize(
    ("call", "place", "reached", "refused"), APART.values(), ids=APART
)
def test_strided_elements_are_reached_or_refused(
    call, place, reached, refused, simulation, monkeypatch
):
    """The last element along each axis in turn lies 2^31 elements after the first."""

    def apart(*shape, dtype=BF16):
        strides = [*torch.empty(shape, device=META).stride()]
        if next(made) == place:
            strides[axis] = -(-(2**31) // (shape[axis] - 1))
        return torch.empty_strided(shape, strides, dtype=dtype, device=META)

    monkeypatch.setitem(globals(), "tensor", apart)
    for axis in range(reached + refused):
        made = count()
        if axis < reached:
            call(simulation)
        else:
            with pytest.raises(ValueError, match="at most"):
                call(simulation)


def kernels_of_the_package() -> set[str]:
    """The names of all Triton kernels, which read their place in a grid, and of no
    helper."""
    texts: dict[str, str] = {}
    for module in pkgutil.walk_packages(megatron_gdn.__path__, "megatron_gdn."):
        if module.name.rpartition(".")[2] == "__main__":
            continue
        spec = module.module_finder.find_spec(module.name)
        if "triton.jit" not in Path(spec.origin).read_text():
            continue
        for name, x in vars(import_module(module.name)).items():
            if isinstance(x, InterpretedFunction):
                texts[name] = inspect.getsource(x.fn)
    called = {
        name
        for name in texts
        for other in texts
        if other != name and re.search(rf"\b{name}\(", texts[other])
    }
    return {name for name, text in texts.items() if "tl.program_id" in text} - called


def test_every_kernel_is_held_to_the_law(simulation):
    """The functions of the laws launch all kernels that there are."""
    simulation.runs = False
    run_readout(3, 1, 514, 1, 128)
    run_front(simulation, 9, 1, SMALL, history=2)
    run_decode(simulation, 2, 3, HeadSizes(1, 1, 16, 16))
    run_chains(simulation, 2, 3, 1, 16, 16, "given")
    run_half(1, 5, 1, 1, 16)
    run_exchange(simulation, 3, 1, TWO_COPIES)
    run_additions(simulation, 2, 1, 4, 1, 16)
    assert simulation.launched == kernels_of_the_package()


# for each size that is too large: what the error says of it, and the call
TOO_LARGE = {
    **{
        f"batch rows of a readout's {name}": (
            "the batch has 65536 rows",
            lambda _, name=name: run_readout(1, 65_536, 514, 1, 128, passes=(name,)),
        )
        for name in BOTH
    },
    **{
        f"batch rows of a front's {name}": (
            "the batch has 65536 rows",
            lambda x, name=name: run_front(x, 1, 65_536, SMALL, passes=(name,)),
        )
        for name in BOTH
    },
    **{
        f"tokens of a front's {name}": (
            "the number of tokens of a tile's end is ",
            lambda x, name=name: run_front(x, 2**31 - 20, 1, SMALL, passes=(name,)),
        )
        for name in BOTH
    },
    "batch rows of a history": (
        "the batch has 65536 rows",
        lambda x: run_additions(x, 1, 1, 1, 65_536, 16),
    ),
    "channels of a history that lie apart": (
        "the number of channels times their distance is ",
        lambda x: run_lead_in(x, tensor(16, 3, 2**27).permute(1, 2, 0)[:, :1]),
    ),
    "batch rows times channels of a history": (
        "the number of batch rows times channels is ",
        lambda x: run_additions(x, 1, 1, 1, 65_535, 2**15),
    ),
    "sequences": (
        "a call decodes 65536 sequences",
        lambda x: run_decode(x, 65_536, 65_536, HeadSizes(1, 1, 16, 16)),
    ),
    "a state": (
        "the number of elements of a state is ",
        lambda x: run_decode(x, 1, 1, HeadSizes(1, 2**13, 512, 512)),
    ),
    "inputs of a history": (
        "the number of inputs of a history is ",
        lambda x: run_decode(x, 1, 1, HeadSizes(2**23 - 1, 2**23 - 1, 16, 16)),
    ),
    "a slot": (
        "the number of elements of a slot is ",
        lambda _: write_slots_on_gpu(
            tensor(1, 2**31), tensor(1, dtype=INT32), tensor(1, 2**31)
        ),
    ),
    "a state map": (
        "the size of a state map with its strides is ",
        lambda x: run_chains(x, 1, 2, 1, 16, 2**27),
    ),
    "rows of a gradient in fp16": (
        "the number of rows of a key head is ",
        lambda _: run_half(1, 2**31, 1, 1, 16),
    ),
    "rows of a gradient in fp16 whose power is lowered": (
        "the number of rows of a key head is ",
        lambda _: half_kernels.lower_powers(
            tensor(1, 2**31, 1, 16, dtype=torch.float16),
            tensor(1, dtype=FP32),
            tensor(1, 1, 16, 16, dtype=FP32),
            1,
            0,
        ),
    ),
    "a tile of a gradient in fp16": (
        "the number of elements of a tile is ",
        lambda _: run_half(1, 1, 2**15, 2**15, 2**16),
    ),
    "tiles of an exchange": (
        "the number of tiles of a head exchange is ",
        lambda x: run_exchange(x, 2**20, 2**10, HeadShares.even(512, [2**19])),
    ),
    "rows of an exchange's sums": (
        "the number of tokens times batch rows is ",
        lambda _: pack.unpack_peers(
            tensor(1, 2**16, 2**15, 16),
            tensor(2**17, 2**15, 16),
            tensor(2**16, 2**15, 16),
            HeadShares(2, (16,), (2,)),
            0,
            tensor(2**16, dtype=INT32),
        ),
    ),
    "rows of an exchange": (
        "the number of tokens times batch rows is ",
        lambda x: run_exchange(x, 2**16, 2**15, TWO_COPIES),
    ),
    "columns of partial sums": (
        "the number of columns of partial sums is ",
        lambda _: sum_rows(tensor(1, 2**31, dtype=FP32), tensor(2**31)),
    ),
    "partial sums": (
        "the number of rows of partial sums is ",
        lambda _: sum_rows(tensor(2**31, 16, dtype=FP32), tensor(16)),
    ),
    "slots of a batch": (
        "a call decodes 70000 sequences",
        lambda _: write_slots_on_gpu(
            tensor(4, 16), tensor(70_000, dtype=INT32), tensor(70_000, 16)
        ),
    ),
}


@pytest.mark.parametrize(("said", "call"), TOO_LARGE.values(), ids=TOO_LARGE)
def test_a_size_that_no_kernel_takes_is_refused_in_words(said, call, simulation):
    most = r"at most (65535|2147483647|\(2147483647, 65535, 65535\))"
    with pytest.raises(ValueError, match=f"{re.escape(said)}.*{most}"):
        call(simulation)


def test_every_check_of_a_size_is_met_by_a_size_that_is_too_large(simulation):
    """Of the package's calls of functions that refuse sizes none could go."""
    refuse = re.compile(r"_?require_(32_bits|\w+_within_grid)|within_grid")
    checks = set()
    for path in Path(megatron_gdn.__path__[0]).rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if refuse.search(text) else ():
            if isinstance(node, ast.Call) and refuse.fullmatch(ast.unparse(node.func)):
                checks.add((str(path), node.lineno))
    simulation.runs = False
    met = set()
    for _, call in TOO_LARGE.values():
        with pytest.raises(ValueError) as error:
            call(simulation)
        met |= {(str(entry.path), entry.lineno + 1) for entry in error.traceback}
    assert checks - met == set()


def test_a_launch_refuses_a_grid_that_cuda_does_not_take():
    """Whatever the kernel: an axis of CUDA's grid has a largest size."""
    kernel = pack.copy_columns_kernel
    for axis, most in enumerate((2**31 - 1, 65_535, 65_535)):
        grid = [1, 1, 1]
        grid[axis] = most
        Launch(kernel, tuple(grid), num_warps=4)
        grid[axis] = most + 1
        with pytest.raises(ValueError, match="copy_columns_kernel needs a grid"):
            Launch(kernel, tuple(grid), num_warps=4)


def test_fla_gets_no_grid_that_cuda_does_not_take():
    """Its kernels count batch rows times heads on an axis that has at most 65,535."""

    def begin(B, H, documents=None):
        made = RuleInputs(
            *(tensor(B, 64, H, *w) for w in ((16,), (16,), (16,), (), ()))
        )
        return FlaGDN().begin(made, documents)

    begin(2047, 32)
    with pytest.raises(ValueError, match="2048 batch rows of 32 heads.*65535.*packed"):
        begin(2048, 32)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    st.integers(0, 26),
    st.integers(0, 16),
    st.sampled_from([1, 3, 48]),
    st.sampled_from([8, 100]),
    st.integers(0, 20_000),
)
def test_any_readout_is_exact_or_refused(log_S, log_B, H, V, more):
    """Sizes around each power of two."""
    made = Simulation()
    S, B = max(1, 2**log_S - 1 + more % 3), max(1, 2**log_B - 1 + more % 2)
    with pytest.MonkeyPatch.context() as patch:
        run = lambda self, *a, **k: made.run(self, *a, **k)  # noqa: E731
        patch.setattr(InterpretedFunction, "run", run)
        try:
            run_readout(S, B, H * V + more, H, V)
        except ValueError as error:
            assert "at most" in str(error)


def sparse(*shape, strides, dtype=torch.float16):
    """A CPU tensor whose elements lie so far apart; memory is taken where it is touched
    alone.

    As many bytes again lie before it and after it, so that a wrong offset reaches
    zeros.
    """
    reach = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
    no_reserve = 0x4000  # MAP_NORESERVE of Linux, which Python names from 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    held = mmap.mmap(-1, 3 * reach * dtype.itemsize, flags=flags)
    return torch.frombuffer(held, dtype=dtype).as_strided(shape, strides, reach)


@pytest.fixture
def in_place(monkeypatch):
    """The interpreter would copy all bytes of a storage to itself after a launch."""
    from triton.runtime.interpreter import GridExecutor

    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)


@pytest.mark.parametrize("name", LAST_TOKENS)
def test_the_last_token_of_a_tile_is_read_where_it_is(name, in_place):
    """One batch row of a batch of so many, with numbers, against the plain twin."""
    S, B, P, H, V, *groups = LAST_TOKENS[name]
    G = groups[0] if groups else None
    torch.manual_seed(0)
    gate = slice(P - H * V, P)
    dense = torch.randn(S, 1, P).half()
    rows = sparse(S, 1, P, strides=(B * P, P, 1)).copy_(dense)
    d_rows = sparse(S, 1, P, strides=(B * P, P, 1))
    o = torch.randn(1, S, H, V).half()
    gamma = torch.randn(V if G is None else H * V)
    d_out = torch.randn(S, 1, H * V).half()
    ours, twin = (
        kind(gate, "silu", 1e-5, groups=G) for kind in (TritonReadout, PlainReadout)
    )
    wide = [x.double() for x in (o, dense, gamma)]
    assert_close("out", ours.forward(o, rows, gamma), twin.forward(*wide), 2**-10)
    d_dense = torch.zeros_like(wide[1])
    # The tile of the whole batch, which has more rows than that of one batch row.
    tile = norm_backward_tile(S * H * B, V if G is None else H * V // G)
    found = ours.backward(d_out, o, rows, gamma, d_rows, tile=tile)
    exact = twin.backward(d_out.double(), *wide, d_dense)
    for what, a, b in zip(("d_o", "d_gamma"), found, exact, strict=True):
        assert_close(what, a, b, 2**-10)
    assert_close("d_z", d_rows[..., gate], d_dense[..., gate], 2**-10)


def test_the_sanitizers_script_knows_every_kernel(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import sanitize

    assert sanitize.kernels_of_the_package() == kernels_of_the_package()
