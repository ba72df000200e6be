"""fla's ``simple_gla`` kernels as Mamba2's rule, in Triton's interpreter, against fp64.

A GPU has them in bf16 only, see tests/mamba2/test_gpu_rule.py. Here they run in fp32, so that a
wrong scale, base of the logarithm, boundary or state shows in the last digits.
"""

import builtins
import operator

import pytest
import torch

from megatron_gdn.mamba2.fla import FlaSSD
from megatron_gdn.mamba2.plain import SSDInputs
from tests.mamba2.oracle import documents_of, oracle, random_inputs

from .conftest import INTERPRETED
from .kernel_cases import assert_close

pytest.importorskip("fla.ops.simple_gla.chunk")
pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="on a GPU fla would round fp32 to tf32"),
    # Decays between tokens of the wrong order, which a mask then drops.
    pytest.mark.filterwarnings("ignore:overflow encountered"),
]

SIZES = {"G": 1, "H": 2, "K": 16, "V": 16}


@pytest.fixture
def rule(monkeypatch) -> FlaSSD:
    """fla's rule, with what the interpreter cannot do: time kernels, and count in tensors."""
    import triton.language as tl
    from fla.ops.common import chunk_h, chunk_o
    from fla.ops.utils import cumsum

    for kernel in (
        chunk_h.chunk_fwd_kernel_h, chunk_h.chunk_bwd_kernel_dh, chunk_o.chunk_fwd_kernel_o,
        chunk_o.chunk_bwd_kernel_dqkwg, chunk_o.chunk_bwd_kernel_dv,
        cumsum.chunk_local_cumsum_scalar_kernel,
    ):  # fmt: skip
        while not hasattr(kernel, "configs"):
            kernel = kernel.fn
        monkeypatch.setattr(kernel, "configs", kernel.configs[:1])

    def tensors(*bounds):
        """``range``, whose numbers have the methods of tensors, as compiled ones have."""
        return (tl.full((), i, tl.int32) for i in builtins.range(*map(operator.index, bounds)))

    monkeypatch.setattr(chunk_h, "range", tensors, raising=False)
    return FlaSSD()


@pytest.mark.parametrize(
    ("lengths", "packed", "with_states", "per_channel_D"),
    [((65, 65), False, False, False), ((1, 64, 0, 65), True, True, True)],
    ids=["rows", "documents and states"],
)
def test_the_kernels_give_what_the_recurrence_gives(
    rule, lengths, packed, with_states, per_channel_D
):
    rows, count = (1 if packed else 2), len([n for n in lengths if n])
    tokens = sum(lengths) // rows
    inputs, d_o = random_inputs(tokens, rows, torch.float32, per_channel_D, **SIZES)
    documents = documents_of(lengths) if packed else None
    initial, d_final = torch.randn(2, count, 2, 16, 16) * with_states
    given = (initial, d_final) if with_states else (None, None)
    o, final, expected, d_initial = oracle(inputs, lengths, d_o, initial, d_final)

    begun = rule.begin(inputs, documents)
    maps, got = begun.state_map(), begun.run(given[0], final=True)
    backward = rule.begin_backward(d_o, inputs, got.saved, documents)
    d_local, grads = backward.d_initial(), backward.run(*given)
    for name, a, b in zip(
        ("o", "final", *SSDInputs._fields), (got.o, got.final, *grads), (o, final, *expected),
        strict=True,
    ):  # fmt: skip
        assert_close(name, a, b)
    assert_close("final state by the map", maps.apply(initial), final)
    through = maps.transposed(d_local).apply(d_final)
    assert_close("gradient of the initial state", through, d_initial)
    assert {t.dtype for t in (got.final, *maps, d_local)} == {torch.float32}
