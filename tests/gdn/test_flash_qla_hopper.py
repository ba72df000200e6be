"""FlashQLA's kernels with held kernels against its own functions: the same bits, on a
Hopper GPU."""

from types import SimpleNamespace

import pytest
import torch

from megatron_gdn.gdn.flash_qla import hopper as flash_qla_hopper
from megatron_gdn.gdn.flash_qla import plan as flash_qla_plan
from megatron_gdn.gdn.flash_qla import rule as flash_qla
from megatron_gdn.gdn.flash_qla import states as flash_qla_states
from megatron_gdn.gdn.flash_qla.rule import FlashQlaRule
from megatron_gdn.gdn.rule import RuleInputs
from tests.ops.delta_rule.states import backward_of, documents_of

from .stand_ins import forget_plans

HEADS = (16, 32)


def test_what_tilelang_wraps_is_called_itself():
    """A stand-in of tilelang's kernel object, loaded from its cache or compiled
    here."""

    class Module:
        def main(self, *args):
            return args

    class Executable:
        def jit(self):
            return Module()

    class Adapter:
        result_idx = ()

        def __init__(self, executable):
            self.get_exportable_executable = lambda: executable

    class Kernel:
        def __init__(self, adapter):
            self.adapter = adapter

    for executable in (Module(), Executable()):
        assert flash_qla_hopper.compiled_function(Kernel(Adapter(executable)))(
            1, 2
        ) == (1, 2)
    with_results = Adapter(Module())
    with_results.result_idx = [0]
    for unknown in (Kernel(with_results), Kernel(object()), object()):
        assert flash_qla_hopper.compiled_function(unknown) is unknown


def first_chunks(cu_seqlens, chunk_size):
    """As FlashQLA's function: the first chunk of each sequence, and all chunks."""
    chunks = -(-cu_seqlens.diff() // chunk_size)
    return torch.cat([chunks.new_zeros(1), chunks.cumsum(0)]), int(chunks.sum())


@pytest.mark.parametrize("final", [False, True])
def test_what_a_kernel_writes_is_no_state_that_entered(final):
    """FlashQLA's kernel of states writes ``through`` also where nobody asks for it."""
    calls = []
    kernels = flash_qla_hopper.HopperKernels(SimpleNamespace(build_cp_context=None), {})
    kernels._chunk_table_module = SimpleNamespace(prepare_chunk_offsets=first_chunks)
    kernels._kernel = lambda stage, *key: lambda *args: calls.append(args)
    G = 1
    H = 2
    K = 16
    k, v = torch.zeros(1, 192, G, K), torch.zeros(1, 192, H, K)
    a, g = torch.zeros(1, 192, H, 64), torch.zeros(1, 192, H)
    initial = torch.ones(2, H, K, K)
    _, last, through = kernels.fused_gdr_h(
        k,
        v,
        a,
        g,
        g,
        initial,
        final,
        cu_seqlens=torch.tensor([0, 128, 192], dtype=torch.int32),
    )
    (args,) = calls
    boundaries, starts = args[6:8]
    assert boundaries.tolist() == [0, 128, 192] and starts.tolist() == [0, 2, 3]
    assert boundaries.dtype == starts.dtype == torch.int32
    h, ending, correction = args[-3:]
    assert h.shape == (1, 3, H, K, K)
    written = [h, correction, ending] if final else [h, correction]
    places = {x.untyped_storage().data_ptr() for x in written}
    assert (
        len(places) == len(written)
        and initial.untyped_storage().data_ptr() not in places
    )
    assert args[5] is initial and correction.shape == ending.shape == initial.shape
    assert (
        (last is ending and through is correction)
        if final
        else (last is through is None)
    )


def test_a_segments_last_chunks_reach_the_kernel():
    calls = []
    kernels = flash_qla_hopper.HopperKernels(SimpleNamespace(build_cp_context=None), {})
    kernels._chunk_table_module = SimpleNamespace(prepare_chunk_offsets=first_chunks)
    kernels._kernel = lambda stage, *key: lambda *args: calls.append(args)
    k, v = torch.zeros(1, 192, 1, 16), torch.zeros(1, 192, 2, 16)
    a, g = torch.zeros(1, 192, 2, 64), torch.zeros(1, 192, 2)
    last_chunks = torch.ones(2, 2, dtype=torch.int32)
    offsets = torch.tensor([0, 128, 192], dtype=torch.int32)
    for chunks in (last_chunks, None):
        kernels.fused_gdr_h(k, v, a, g, g, cu_seqlens=offsets, num_warmup_chunks=chunks)
    of_segments, unread = (args[8] for args in calls)
    assert of_segments is last_chunks
    assert unread.shape == last_chunks.shape and unread.dtype == last_chunks.dtype


def test_every_kernel_is_made_for_value_heads_key_heads_key_dim_and_value_dim():
    """In this order, which FlashQLA's factories have, of those that a kernel has."""
    made = {}
    modules = {"fused_gdr_fwd": SimpleNamespace(TARGET_NUM_CTAS=9)}
    library = SimpleNamespace(build_cp_context=None)
    kernels = flash_qla_hopper.HopperKernels(library, modules)
    kernels._chunk_table_module = SimpleNamespace(
        prepare_chunk_offsets=first_chunks, prepare_chunk_indices=first_chunks
    )
    kernels._kernel = lambda stage, _, *key: lambda *args: made.update({stage: key})
    H, G, K, V = sizes = (6, 3, 32, 16)
    k, v = torch.zeros(1, 192, G, K), torch.zeros(1, 192, H, V)
    a, g = torch.zeros(1, 192, H, 64), torch.zeros(1, 192, H)
    offsets = torch.tensor([0, 128, 192], dtype=torch.int32)
    local, through = torch.zeros(2, H, K, V), torch.zeros(2, H, K, K)
    mask, warmup = torch.zeros(2, dtype=torch.bool), offsets.new_ones(2, H)
    kernels.chunk_local_cumsum(g, offsets)
    kernels.kkt_solve(k, g, offsets)
    kernels.get_warmup_chunks_bidi(g, offsets, mask, mask, -10)
    kernels.fused_gdr_h(k, v, a, g, g, cu_seqlens=offsets)
    kernels.correct_initial_states(None, local, through, warmup > 0, offsets[:2])
    kernels.fused_gdr_fwd(k, k, v, a, g, g, 1.0, cu_seqlens=offsets)
    kernels.fused_gdr_dh(k, k, a, g, g, v, 1.0, offsets, warmup)
    h = torch.zeros(1, 3, H, K, V)
    kernels.fused_gdr_bwd(k, k, v, a, g, g, v, None, h, 1.0, offsets)
    missing = {"kkt_solve": {V}, "correct_initial_states": {G}}
    missing |= dict.fromkeys(
        ("chunk_local_cumsum", "get_warmup_chunks_bidi"), {G, K, V}
    )
    assert len(made) == 8
    for stage, key in made.items():
        expected = tuple(x for x in sizes if x not in missing.get(stage, ()))
        assert key[: len(expected)] == expected, stage


@pytest.mark.parametrize("asked", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("all_chunks", [True, False])
def test_states_have_the_dtype_asked_for_or_that_of_flash_qlas_function(
    all_chunks, asked
):
    """Its states of whole segments are fp32, those of last chunks have the dtype of
    k."""
    kernels = flash_qla_hopper.HopperKernels(SimpleNamespace(build_cp_context=None), {})
    kernels._chunk_table_module = SimpleNamespace(prepare_chunk_offsets=first_chunks)
    kernels._kernel = lambda stage, *key: lambda *args: None
    k = torch.zeros(1, 192, 2, 16, dtype=torch.bfloat16)
    a, g = torch.zeros(1, 192, 2, 64), torch.zeros(1, 192, 2)
    _, last, through = kernels.fused_gdr_h(
        *(k, k, a, g, g),
        cu_seqlens=torch.tensor([0, 128, 192], dtype=torch.int32),
        num_warmup_chunks=None if all_chunks else torch.ones(2, 2, dtype=torch.int32),
        final_dtype=asked,
    )
    own = torch.float32 if all_chunks else k.dtype
    assert last.dtype == through.dtype == (asked or own)


def inputs_of(S, B):
    make = torch.Generator(device="cuda").manual_seed(5)

    def normal(*shape):
        return torch.randn(B, S, *shape, generator=make, device="cuda")

    G, H = HEADS
    q, k = (
        torch.nn.functional.normalize(normal(G, 128), dim=-1).half() for _ in range(2)
    )
    g = -normal(H).abs() * 0.05
    return RuleInputs(q, k, normal(H, 128).half(), g, normal(H).sigmoid()), normal(
        H, 128
    ).half()


def all_of(rule, inputs, d_o, documents):
    o, _, saved = rule.begin(inputs, documents).run()
    yield from (o, *backward_of(rule, inputs, d_o, saved, documents).run()[:5])
    forward = rule.begin(inputs, documents)
    initial = forward.state_map().local
    o, _, saved = forward.run(initial)
    backward = backward_of(rule, inputs, d_o, saved, documents)
    yield from (initial, o, backward.d_initial())
    yield from backward.run(initial, initial.clone())[:5]


CASES = {
    "cut": (9000, 1, None),
    "uncut": (777, 1, None),
    "rows": (200, 3, None),
    "documents": (9000, 1, (1, 62, 65, 8172, 700)),
    "short documents": (300, 1, (100, 0, 1, 199)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_same_bits(case, monkeypatch):
    pytest.importorskip("flash_qla")
    held = flash_qla_plan.kernels()
    if not isinstance(held, flash_qla_hopper.HopperKernels):
        pytest.skip("kernels are held on Hopper only")
    S, B, lengths = case
    documents = None if lengths is None else documents_of(lengths, "cuda")
    inputs, d_o = inputs_of(S, B)
    rule = FlashQlaRule()
    runs = [list(all_of(rule, inputs, d_o, documents)) for _ in range(2)]

    own = flash_qla_plan.flash_qla_module()

    class Own:
        """FlashQLA's functions, and its kernel of states as context parallelism has it,
        in fp32."""

        def __getattr__(self, name):
            return getattr(own, name)

        def get_warmup_chunks_bidi(self, **kwargs):
            self.from_zero = bool(kwargs["ht_mask_fwd"].any())
            return own.get_warmup_chunks_bidi(**kwargs)

        def fused_gdr_h(self, num_warmup_chunks=None, **kwargs):
            if num_warmup_chunks is None or self.from_zero:
                return own.fused_gdr_h(num_warmup_chunks=num_warmup_chunks, **kwargs)
            return held.fused_gdr_h(
                num_warmup_chunks=num_warmup_chunks, final_dtype=torch.float32, **kwargs
            )

    functions = Own()
    for module in (flash_qla, flash_qla_plan, flash_qla_states):
        monkeypatch.setattr(module, "kernels", lambda: functions)
    forget_plans()
    runs.append(list(all_of(rule, inputs, d_o, documents)))
    forget_plans()
    for again in runs[1:]:
        for number, (x, y) in enumerate(zip(runs[0], again, strict=True)):
            assert torch.equal(x, y), number
