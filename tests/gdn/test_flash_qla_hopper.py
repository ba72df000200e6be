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
    of_unknown_results = SimpleNamespace(get_exportable_executable=Module)
    adapters = (with_results, of_unknown_results, object(), Adapter(object()))
    for unknown in (object(), *map(Kernel, adapters)):
        assert flash_qla_hopper.compiled_function(unknown) is unknown


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
