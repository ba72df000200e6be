"""Which delta rule the mixer and the function take, and what they say when one cannot
be had."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megatron_gdn.gdn.api import (
    gated_delta_rule,
    gradients_of_key_heads,
    recurrent_gated_delta_rule,
    run_rule,
    torch_chunk_gated_delta_rule,
)
from megatron_gdn.gdn.flash_qla import rule as flash_qla
from megatron_gdn.gdn.flash_qla.rule import FlashQlaRule
from megatron_gdn.gdn.rule import FlaGDN, resolve_rule
from megatron_gdn.gdn2.rule import FlaGDN2
from megatron_gdn.kda.rule import FlaKDA
from megatron_gdn.mamba2.rule import FlaSSD
from megatron_gdn.ops.delta_rule.base import HeadSizes, RuleGrads, RuleInputs
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.obstacles import log_obstacle_once, why_not_flash_qla
from megatron_gdn.ops.rules import repeatable
from megatron_gdn.ops.rules.base import Bits, Rule, RuleBackward
from megatron_gdn.ops.rules.fla import ChunkProducts
from megatron_gdn.ops.rules.repeatable import RepeatableSetup
from megatron_gdn.ops.state_maps.state_map import StateShape
from tests.gdn_mixer import gated_delta_mixer
from tests.ops.delta_rule.test_gated_delta_rule import make_inputs
from tests.processes import python

SIZES = HeadSizes(16, 32, 128, 128)


@pytest.mark.parametrize("rule", [FlaGDN, FlaGDN2, FlaKDA, FlaSSD])
def test_fla_takes_states_of_up_to_256_rows(rule):
    assert rule.why_not_sizes(StateShape(2, 256, 64)) is None
    for rows in (257, 258):
        said = rule.why_not_sizes(StateShape(2, rows, 64))
        assert said is not None and f"up to 256, not {rows}" in said


def test_deterministic_auto_takes_the_reference_without_a_gpu():
    where = {"device": "cpu", "dtype": torch.bfloat16, "bits": Bits.DETERMINISTIC}
    choice = resolve_rule(sizes=SIZES, **where)
    assert choice.rule.name == "reference"
    whys = (
        f"not {name}: {name} runs on a GPU, not on cpu" for name in ("flash_qla", "fla")
    )
    assert choice.reason == "; ".join(("deterministic mode", *whys))


@pytest.mark.parametrize("bits", [Bits.FREE, Bits.DETERMINISTIC])
def test_the_reference_may_always_be_asked_for(bits):
    choice = resolve_rule(
        "reference", device="cpu", dtype=torch.float64, sizes=SIZES, bits=bits
    )
    assert choice == (choice.rule, "requested") and choice.rule.name == "reference"


KNOWN = RepeatableSetup(
    (9, 0), {"flash-qla": "0.1.3"}, (torch.bfloat16,), (1, 2), "200 repeats were equal"
)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(repeatable, "installed_version", lambda package: "0.1.3")
    monkeypatch.setattr(flash_qla, "REPEATABLE_SETUPS", (KNOWN,))
    monkeypatch.setattr(flash_qla, "why_not_flash_qla", lambda *_: None)
    monkeypatch.setattr(FlaGDN, "why_not", lambda *_: None)
    log_obstacle_once.cache_clear()
    return monkeypatch


def on_a_gpu(backend="auto", dtype=torch.bfloat16, sizes=SIZES):
    return resolve_rule(
        backend,
        device="cuda",
        dtype=dtype,
        sizes=sizes,
        bits=Bits.DETERMINISTIC,
        operands="bf16",
    )


def test_deterministic_auto_takes_what_was_seen_to_repeat_in_its_batch_invariant_form(
    hopper,
):
    rule, reason = on_a_gpu()
    assert type(rule) is FlashQlaRule and rule.batch_invariant
    assert reason == "deterministic mode; 200 repeats were equal"


def test_a_rule_by_name_says_in_deterministic_mode_if_nothing_saw_it_repeat(hopper):
    assert on_a_gpu("flash_qla").reason == "requested"
    said = on_a_gpu("flash_qla", sizes=HeadSizes(16, 64, 128, 128)).reason
    assert said.startswith("requested; ")


def test_an_aligned_rule_is_flash_qla_where_it_was_seen_to_repeat_and_else_plain(
    hopper,
):
    def chosen(device="cuda", dtype=torch.bfloat16, sizes=SIZES, backend="auto"):
        rule, _ = resolve_rule(
            backend, sizes=sizes, device=device, dtype=dtype, bits=Bits.ON_GRID
        )
        assert (
            rule.bits is Bits.ON_GRID
            and rule.batch_invariant
            and rule.operand_dtype is None
        )
        return rule.name

    assert chosen() == "flash_qla"
    assert chosen("cpu") == chosen(dtype=torch.float32) == "reference"
    assert chosen(sizes=HeadSizes(16, 64, 128, 128)) == "reference"
    assert chosen(backend="reference") == "reference"


@pytest.mark.parametrize("rule", [FlaGDN, FlaGDN2, FlaKDA, FlaSSD])
def test_flas_rules_repeat_where_they_were_seen_to(rule, monkeypatch):
    (setup,) = rule.repeatable_setups
    installed = dict(setup.versions)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(repeatable, "installed_version", installed.get)

    def found(dtype, rows, columns):
        state = StateShape(2, rows, columns)
        sizes = SimpleNamespace(**state._asdict(), state_shape=state)
        return rule.repeats(torch.device("cuda"), dtype, sizes)

    dims = (128, 64) if rule is FlaSSD else (128, 128)
    repeated, evidence = found(torch.bfloat16, *dims)
    assert repeated and "equal on an H200" in evidence
    assert not found(torch.float16, *dims).repeated
    assert not found(torch.bfloat16, 64, 64).repeated
    for package in ("flash-linear-attention", "triton"):
        with monkeypatch.context() as other:
            other.setitem(installed, package, "0.1")
            assert not found(torch.bfloat16, *dims).repeated


@pytest.mark.parametrize(
    ("change", "dtype", "sizes"),
    [
        ({"capability": (10, 0)}, torch.bfloat16, SIZES),
        ({"versions": {"flash-qla": "0.1.4"}}, torch.bfloat16, SIZES),
        ({}, torch.float16, SIZES),
        ({}, torch.bfloat16, HeadSizes(16, 64, 128, 128)),
    ],
    ids=["GPU", "version", "dtype", "heads"],
)
def test_deterministic_auto_takes_nothing_untested(hopper, change, dtype, sizes):
    hopper.setattr(flash_qla, "REPEATABLE_SETUPS", (KNOWN._replace(**change),))
    choice = on_a_gpu(dtype=dtype, sizes=sizes)
    assert type(choice.rule) is PlainRule
    assert "not flash_qla: flash_qla was not tested for repeatability" in choice.reason
    by_name = on_a_gpu("flash_qla", dtype, sizes)
    assert type(by_name.rule) is FlashQlaRule and by_name.rule.batch_invariant
    assert "was not tested" in by_name.reason


@pytest.mark.parametrize(
    ("dtype", "sizes", "why"),
    [
        (torch.float32, SIZES, "takes bf16 or fp16"),
        (torch.bfloat16, HeadSizes(16, 32, 64, 128), "key_head_dim=64"),
        (torch.bfloat16, HeadSizes(16, 32, 128, 256), "value_head_dim=256"),
    ],
)
def test_flash_qla_names_the_size_or_dtype_it_cannot_take(dtype, sizes, why):
    obstacle = why_not_flash_qla(
        torch.device("cuda"), dtype, sizes.key_dim, sizes.value_dim
    )
    assert why in obstacle.why and obstacle.error is ValueError


def test_flash_qla_is_not_asked_for_an_odd_number_of_heads(hopper):
    odd = HeadSizes(1, 3, 128, 128)
    assert type(on_a_gpu(sizes=odd).rule) is PlainRule
    with pytest.raises(ValueError, match="even number of value heads per rank, not 3"):
        on_a_gpu("flash_qla", sizes=odd)


def test_a_slower_rule_and_slower_kernels_are_announced_once(caplog):
    log_obstacle_once.cache_clear()
    sizes = HeadSizes(1, 1, 4, 4)
    proj = torch.zeros(3, 1, sizes.layout.width)
    weight = torch.zeros(12, 1, 9)
    with caplog.at_level("INFO", logger="megatron_gdn.ops"):
        for _layer in range(3):
            rule = resolve_rule(device="cpu", dtype=torch.float32, sizes=sizes).rule
            zeros = torch.zeros(1)
            gated_delta_mixer(
                proj, weight, None, zeros, zeros, sizes, rule=rule, norm=None
            )
    rule, kernels = (record.getMessage() for record in caplog.records)
    assert "'reference'" in rule and "not flash_qla" in rule
    assert "plain torch" in kernels and "not on cpu" in kernels


@pytest.mark.slow
def test_importing_the_mixer_loads_no_kernel_package():
    program = (
        "import sys, megatron_gdn.ops.mixer; "
        "loaded = {'triton', 'fla', 'flash_qla', 'megatron.core'} & set(sys.modules); "
        "assert not loaded, loaded"
    )
    python("-c", program)


NAMES = ("q", "k", "v", "g", "beta", "state")
OFFSETS = (0, 3, 3, 70, 71, 71, 130)  # with empty documents


class ValueHeads(PlainRule):
    """As GPU kernels: a gradient of q and k for every value head, doubled, with a
    factor of 1/2."""

    def begin_backward(self, d_o, inputs, saved, documents):
        begun = super().begin_backward(d_o, inputs, saved, documents)
        run = begun.run

        def per_value_head(*states):
            grads = run(*states)
            share = inputs.v.shape[2] // inputs.k.shape[2]
            q, k = (x.repeat_interleave(share, dim=2) / share for x in grads[:2])
            doubled = (x * 2 for x in (q, k, *grads[2:5]))
            factor = torch.full((inputs.v.shape[2],), 0.5, dtype=torch.float64)
            return type(grads)(*doubled, factor)

        begun.run = per_value_head
        return begun


def found(call, inputs, **options):
    leaves = [x.clone().requires_grad_() for x in inputs]
    o, final = call(leaves, initial_state=leaves[5], output_final_state=True, **options)
    make = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=make, dtype=x.dtype) for x in (o, final)]
    grads = torch.autograd.grad((o, final), leaves, weights)
    return {"output": o, "final": final, **dict(zip(NAMES, grads, strict=True))}


@pytest.mark.parametrize("offsets", [None, OFFSETS], ids=["batch", "packed"])
@pytest.mark.parametrize(
    "rule", [PlainRule(), ValueHeads()], ids=["plain", "per value head"]
)
@pytest.mark.parametrize(
    "options",
    [{}, {"scale": 0.3, "use_qk_l2norm_in_kernel": True}],
    ids=["", "scale and l2norm"],
)
def test_a_rule_as_a_function_equals_the_plain_one(rule, offsets, options):
    sequences = None if offsets is None else len(offsets) - 1
    B, T = (2, 70) if offsets is None else (1, offsets[-1])
    extra = {} if sequences is None else {"sequences": sequences}
    inputs = make_inputs(B, T, 2, 4, 8, 6, 1.0, **extra)
    documents = None if offsets is None else Documents(offsets, torch.device("cpu"))

    def staged(x, **states):
        return run_rule(rule, RuleInputs(*x[:5]), documents, **states, **options)

    def plain(x, **states):
        return torch_chunk_gated_delta_rule(
            *x[:5], cu_seqlens=documents, **states, **options
        )

    got = found(staged, inputs)
    expected = found(plain, inputs)
    for name, exact in expected.items():
        torch.testing.assert_close(
            got[name], exact, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_function_and_the_layer_know_the_same_names():
    q, k, v, g, beta, _ = make_inputs(1, 10, 2, 4, 8, 8, 1.0, dtype=torch.float32)
    with pytest.raises(
        ValueError, match="unknown backend 'cuda'; .*'recurrent' or.*'fla', 'ref"
    ):
        gated_delta_rule(q, k, v, g, beta, backend="cuda")
    for name in ("flash_qla", "fla"):
        with pytest.raises(ValueError, match="runs on a GPU, not on cpu"):
            gated_delta_rule(q, k, v, g, beta, backend=name)


def test_final_states_come_only_if_they_are_asked_for():
    inputs = make_inputs(1, 10, 2, 4, 8, 6, 1.0)[:5]
    for call in (
        gated_delta_rule,
        torch_chunk_gated_delta_rule,
        recurrent_gated_delta_rule,
    ):
        assert call(*inputs)[1] is None
    assert run_rule(PlainRule(), RuleInputs(*inputs), None)[1] is None


class MapsInBackward(PlainRule):
    """As rules of kernels: the gradient of the initial states comes from the maps."""

    def begin_backward(self, d_o, inputs, saved, documents):
        begun = super().begin_backward(d_o, inputs, saved, documents)
        begun.run_with_d_initial = partial(RuleBackward.run_with_d_initial, begun)
        return begun


@pytest.mark.parametrize("offsets", [None, OFFSETS], ids=["batch", "packed"])
def test_maps_made_in_the_backward_give_the_gradient_of_the_initial_states(offsets):
    B, T = (2, 70) if offsets is None else (1, offsets[-1])
    extra = {} if offsets is None else {"sequences": len(offsets) - 1}
    inputs = make_inputs(B, T, 2, 4, 8, 6, 1.0, **extra)
    documents = None if offsets is None else Documents(offsets, torch.device("cpu"))

    def by(rule):
        return lambda x, **states: run_rule(
            rule, RuleInputs(*x[:5]), documents, **states
        )

    expected = found(by(PlainRule()), inputs)
    for name, got in found(by(MapsInBackward()), inputs).items():
        torch.testing.assert_close(got, expected[name], rtol=1e-10, atol=1e-10)
    of_output = []
    for rule in (PlainRule(), MapsInBackward()):  # the final states are not read
        state = inputs[5].clone().requires_grad_()
        o, _ = by(rule)(inputs, initial_state=state)
        of_output.append(torch.autograd.grad(o.sum(), state)[0])
    torch.testing.assert_close(*of_output, rtol=1e-10, atol=1e-10)


def test_gradients_per_value_head_are_multiplied_by_the_factor_and_summed():
    make = torch.Generator().manual_seed(0)
    dq, dk, dv = (torch.randn(1, 3, 4, 5, generator=make) for _ in range(3))
    dg, dbeta = (torch.randn(1, 3, 4, generator=make) for _ in range(2))
    factor = torch.tensor([2.0, 2.0, 0.5, 0.5])  # of each value head
    found = gradients_of_key_heads(RuleGrads(dq, dk, dv, dg, dbeta, factor), 2)
    for got, x in zip(found, (dq, dk, dv, dg, dbeta), strict=True):
        expected = x * (factor[:, None] if x.dim() == 4 else factor)
        if x is dq or x is dk:
            expected = expected[:, :, ::2] + expected[:, :, 1::2]
        assert torch.equal(got, expected)


def test_more_pieces_than_flas_kernel_of_maps_takes_are_refused():
    call = SimpleNamespace(
        inputs=RuleInputs(*(torch.zeros(1, 65535, 1, 1) for _ in range(5))),
        documents=Documents(tuple(range(65536)), torch.device("cpu")),
    )
    products = ChunkProducts({"u": torch.zeros(1, 65535, 1, 1)}, ())
    with pytest.raises(ValueError, match="65535 pieces .* takes at most 65534"):
        FlaGDN().state_map(call, products)


class OfKernels(Rule):
    """The plain rule of tensors of which a kernel could take the address alone."""

    backward_reads = PlainRule.backward_reads

    def begin(self, inputs, documents):
        return require_contiguous(PlainRule().begin(inputs, documents), "run", inputs)

    def begin_backward(self, d_o, inputs, saved, documents):
        begun = PlainRule().begin_backward(d_o, inputs, saved, documents)
        return require_contiguous(begun, "run_with_d_initial", (d_o, *inputs))


def require_contiguous(begun, method, inputs):
    run = getattr(begun, method)

    def checked(*states, **options):
        given = [x for x in (*inputs, *states) if isinstance(x, torch.Tensor)]
        assert all(x.is_contiguous() for x in given)
        return run(*states, **options)

    setattr(begun, method, checked)
    return begun


def strided(x):
    return x.transpose(1, -1).contiguous().transpose(1, -1)


def test_kernels_are_given_contiguous_tensors():
    inputs = [strided(x) for x in make_inputs(2, 70, 2, 4, 8, 6, 1.0)]
    leaves = [x.requires_grad_() for x in inputs]

    def by(rule):
        o, final = run_rule(
            rule,
            RuleInputs(*leaves[:5]),
            None,
            initial_state=leaves[5],
            output_final_state=True,
        )
        weights = strided(o.detach()), strided(final.detach())
        return o, final, *torch.autograd.grad((o, final), leaves, weights)

    for got, exact in zip(by(OfKernels()), by(PlainRule()), strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-10)
