"""fla's ``kda`` kernels as the KDA rule, in Triton's interpreter, against fp64.

A GPU has them in bf16 only, see tests/kda/test_gpu_rule.py. Here they run in fp32, so that a
wrong scale, base of the logarithm, boundary or state shows in the last digits.
"""

import builtins
import operator
import sys

import pytest
import torch

from megatron_gdn.kda.fla import FlaKDA
from megatron_gdn.kda.rule import PlainKDA
from megatron_gdn.ops.delta_rule.base import RuleInputs
from megatron_gdn.ops.elementwise import l2norm
from tests.ops.delta_rule.states import NAMES, backward_of, documents_of

from .conftest import INTERPRETED
from .kernel_cases import assert_close

pytest.importorskip("fla.ops.kda.chunk")
pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="on a GPU fla would round fp32 to tf32"),
    # Decays between tokens of the wrong order, which a mask then drops.
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
]
H, K, V = 2, 16, 16


@pytest.fixture
def kernels(monkeypatch) -> None:
    """fla's kernels, with what the interpreter cannot do: time them, gather, count in tensors."""
    import triton.language as tl
    from fla.ops.cp import chunk_fwd
    from fla.ops.kda import chunk_intra

    monkeypatch.setattr(chunk_fwd, "_check_cp_device", lambda device: None)
    monkeypatch.setattr(chunk_intra, "IS_GATHER_SUPPORTED", False)
    monkeypatch.setattr(chunk_intra, "SAFE_GATE_DOT_PRECISION", tl.constexpr("ieee"))

    def tensors(*bounds):
        """``range``, whose numbers have the methods of tensors, as compiled ones have."""
        return (tl.full((), i, tl.int32) for i in builtins.range(*map(operator.index, bounds)))

    for name, module in list(sys.modules.items()):
        if not name.startswith("fla.ops"):
            continue
        for kernel in list(vars(module).values()):
            while hasattr(kernel, "fn") and not hasattr(kernel, "configs"):
                kernel = kernel.fn
            if isinstance(getattr(kernel, "configs", None), list) and len(kernel.configs) > 1:
                monkeypatch.setattr(kernel, "configs", kernel.configs[:1])
        if name.endswith("chunk_delta_h"):
            monkeypatch.setattr(module, "range", tensors, raising=False)


@pytest.mark.parametrize(
    ("lengths", "packed", "bound"),
    [((65, 65), False, None), ((1, 64, 0, 65), True, None), ((1, 64, 0, 65), True, -5.0)],
    ids=["rows", "documents", "bounded"],
)
def test_the_kernels_give_what_the_recurrence_gives(kernels, lengths, packed, bound):
    torch.manual_seed(0)
    rows, count = (1 if packed else 2), len([n for n in lengths if n])
    shape = (rows, sum(lengths) // rows, H)
    inputs = RuleInputs(
        l2norm(torch.randn(*shape, K)), l2norm(torch.randn(*shape, K)), torch.randn(*shape, V),
        -(5 if bound else 1) * torch.rand(*shape, K), torch.rand(shape),
    )  # fmt: skip
    d_o, documents = torch.randn(*shape, V), documents_of(lengths) if packed else None
    initial, d_final = torch.randn(2, count, H, K, V)
    found = []
    for rule, kind in ((FlaKDA(bound), torch.float32), (PlainKDA(), torch.float64)):
        these = RuleInputs(*(x.to(kind) for x in inputs))
        first, last = initial.to(kind), d_final.to(kind)
        begun = rule.begin(these, documents)
        maps, got = begun.state_map(), begun.run(first, final=True)
        d_local = backward_of(rule, these, d_o.to(kind), got.saved, documents).d_initial()
        d_initial = maps.transposed(d_local).apply(last)
        backward = backward_of(rule, these, d_o.to(kind), got.saved, documents)
        grads = backward.run(first, last)
        found.append([got.o, *grads[:5], got.final, maps.apply(first), d_initial])
    names = (*NAMES, "final", "final by the map", "d_initial")
    for name, a, b in zip(names, *found, strict=True):
        assert_close(name, a, b)
