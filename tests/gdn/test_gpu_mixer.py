"""The mixer in bf16 on a GPU: as close to fp64 as plain torch in bf16 is, and
repeatable."""

import sys

import pytest
import torch

from megatron_gdn.gdn.flash_qla import plan as flash_qla_plan
from megatron_gdn.gdn.flash_qla.fences import missing_fences
from megatron_gdn.gdn.rule import RULES, resolve_rule
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.recompute import RefilledOutput
from megatron_gdn.ops.stages import GatedNorm
from tests.gdn_mixer import gated_delta_mixer
from tests.host_reads import waiting_refused
from tests.ops.delta_rule.states import documents_of

pytestmark = pytest.mark.gpu

NAMES = ("out", "proj", "conv_weight", "A_log", "dt_bias", "gamma")
# A_log; exp of it is the decay rate
DECAYS = {"strong": 2.8, "usual": 0.0, "none": -20.0}
ALL_DECAYS = {**DECAYS, "slow": -4.6}
HALF = ("flash_qla fp16", "fla fp16")
SHAPES = {
    "S1": {"S": 1},
    "S63-B2": {"S": 63, "B": 2},
    "S777": {"S": 777},
    "S2100-B3": {"S": 2100, "B": 3},
    "packed": {"S": 1000, "lengths": (1, 2, 3, 63, 65, 0, 500, 366)},
    "long": {"S": 9000},
}
RATIOS = {"1": (16, 16), "2": (16, 32), "3": (16, 48), "4": (16, 64)}


def make_inputs(heads, S, B=1, lengths=None, decay="usual", dim=(128, 128), seed=0):
    make = torch.Generator(device="cuda").manual_seed(seed)
    sizes = HeadSizes(*heads, *dim)

    def normal(*shape, dtype=torch.bfloat16):
        x = torch.randn(*shape, generator=make, device="cuda")
        return x.to(dtype).requires_grad_()

    proj = normal(S, B, sizes.layout.width)
    weight = (normal(sizes.layout.conv_width, 1, 4).detach() * 0.5).requires_grad_()
    A_log = normal(heads[1], dtype=torch.float32).detach() * 0.3 + ALL_DECAYS[decay]
    A_log.requires_grad_()
    dt_bias = normal(heads[1], dtype=torch.float32)
    gamma = (1 + 0.3 * normal(dim[1]).detach()).requires_grad_()
    documents = documents_of(lengths, "cuda")
    d_out = normal(S, B, sizes.value_heads * dim[1]).detach()
    return sizes, [proj, weight, A_log, dt_bias, gamma], d_out, documents


def run(sizes, leaves, d_out, documents, rule, kernels="auto", **options):
    leaves = [x.detach().requires_grad_() for x in leaves]
    proj, weight, A_log, dt_bias, gamma = leaves
    out = gated_delta_mixer(
        proj,
        weight,
        None,
        A_log,
        dt_bias,
        sizes,
        rule=rule,
        norm=GatedNorm(gamma),
        documents=documents,
        kernels=kernels,
        **options,
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(out.dtype))]


def rule_named(name, sizes, dtype=torch.bfloat16):
    """A rule by its name, of which " fp16" may be a part: with such operands."""
    name, half, _ = name.partition(" fp16")
    operands = "fp16" if half else "bf16"
    try:
        return resolve_rule(
            name, device="cuda", dtype=dtype, sizes=sizes, operands=operands
        ).rule
    except ImportError as error:
        pytest.skip(str(error))


def errors(got, exact):
    """Relative error of each tensor in the Frobenius norm; NaN is infinite."""
    found = []
    for a, b in zip(got, exact, strict=True):
        error = ((a.double() - b).norm() / b.norm().clamp_min(1e-30)).item()
        found.append(error if error == error else float("inf"))
    return found


def check_against_fp64(
    heads, rule_name, yardstick, seeds=4, allow_neg_eigval=False, **shape
):
    """At most 1.2 times the error of the twins around the rule ``yardstick``, in bf16
    over several draws; of n numbers pooled, the ratio of two errors has a standard
    deviation of 1 / sqrt(n), of which two are allowed."""
    squares = {"got": torch.zeros(len(NAMES)), "plain": torch.zeros(len(NAMES))}
    for seed in range(seeds):
        sizes, leaves, d_out, documents = make_inputs(heads, seed=seed, **shape)
        wide = [x.detach().double() for x in leaves]
        batch = (d_out, documents)
        options = {"allow_neg_eigval": allow_neg_eigval}
        twins = {"kernels": "torch", **options}
        exact = run(sizes, wide, *batch, rule_named("reference", sizes), **twins)
        plain = run(sizes, leaves, *batch, rule_named(yardstick, sizes), **twins)
        got = run(sizes, leaves, *batch, rule_named(rule_name, sizes), **options)
        squares["got"] += torch.tensor(errors(got, exact)).square()
        squares["plain"] += torch.tensor(errors(plain, exact)).square()
    found = [(squares[key] / seeds).sqrt().tolist() for key in ("got", "plain")]
    numbers = [seeds * x.numel() for x in exact]
    lines = [
        f"{n}: {a:.2e}, plain torch {b:.2e}"
        for n, a, b in zip(NAMES, *found, strict=True)
    ]
    print("\n" + "\n".join(lines))
    bad = [
        line
        for line, a, b, n in zip(lines, *found, numbers, strict=True)
        if not a <= 1.2 * b * (1 + 2 * n**-0.5)
    ]
    assert not bad, "; ".join(bad)


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
@pytest.mark.parametrize("shape", SHAPES)
def test_our_kernels_cost_no_accuracy_at_any_shape(shape, rule):
    seeds = 1 if shape == "long" else 4
    check_against_fp64((16, 32), rule, yardstick=rule, seeds=seeds, **SHAPES[shape])


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("decay", DECAYS)
def test_our_kernels_cost_no_accuracy_at_any_ratio_and_decay(ratio, decay, rule):
    check_against_fp64(RATIOS[ratio], rule, yardstick=rule, S=321, decay=decay)


FP16 = {
    **{decay: ("2", {"S": 777, "decay": decay}) for decay in ALL_DECAYS},
    **{
        name: ("2", SHAPES[name] | {"seeds": 2})
        for name in ("S63-B2", "S2100-B3", "packed")
    },
    **{f"ratio {ratio}": (ratio, {"S": 321}) for ratio in ("1", "3", "4")},
    **{
        f"write strengths up to 2, {decay}": (
            "2",
            {"S": 777, "decay": decay, "allow_neg_eigval": True, "seeds": 2},
        )
        for decay in ("none", "usual", "slow")
    },
}


@pytest.mark.parametrize("rule", HALF)
@pytest.mark.parametrize("case", FP16)
def test_fp16_operands_are_as_exact_as_plain_torch(case, rule):
    ratio, options = FP16[case]
    check_against_fp64(RATIOS[ratio], rule, yardstick="reference", **options)


def test_fp16_operands_know_no_size_of_the_gradient():
    """Powers of two leave every bit: nothing over- or underflows on the way."""
    sizes, leaves, d_out, documents = make_inputs((16, 32), S=333)
    rule = rule_named("flash_qla fp16", sizes)
    usual = run(sizes, leaves, d_out, documents, rule)
    for size in (2.0**-60, 2.0**60):
        got = run(sizes, leaves, d_out * size, documents, rule)
        for name, a, b in zip(NAMES[1:], got[1:], usual[1:], strict=True):
            assert torch.equal(a, b * size), name


def test_other_head_dims_take_a_path_that_is_right():
    sizes = HeadSizes(16, 32, 64, 64)
    chosen = resolve_rule(device="cuda", dtype=torch.bfloat16, sizes=sizes).rule.name
    assert chosen in ("fla", "reference")
    check_against_fp64((16, 32), "auto", yardstick="auto", S=130, dim=(64, 64))


@pytest.mark.parametrize("shape", ["S1", "S777", "packed"])
def test_the_heads_of_olmo_hybrid_are_as_exact_as_plain_torch(shape):
    more = {"dim": (96, 192), "allow_neg_eigval": True, **SHAPES[shape]}
    check_against_fp64((6, 6), "fla fp16", yardstick="reference", seeds=2, **more)


@pytest.mark.parametrize("rule", ["flash_qla", "fla", "flash_qla fp16"])
@pytest.mark.parametrize("shape", ["S777", "S2100-B3", "packed"])
def test_recomputing_keeps_every_bit(shape, rule):
    sizes, leaves, d_out, documents = make_inputs((16, 32), **SHAPES[shape])
    rule = rule_named(rule, sizes)
    saved = run(sizes, leaves, d_out, documents, rule)
    again = run(sizes, leaves, d_out, documents, rule, recompute_qkv=True)
    for name, a, b in zip(NAMES, saved, again, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("shape", ["S777", "S2100-B3", "packed", "long"])
@pytest.mark.parametrize("rule", ["fla", "flash_qla", *HALF])
def test_a_second_run_of_the_rule_is_as_exact(shape, rule):
    """fla's has the first one's bits; FlashQLA's states are rounded by another
    kernel."""
    sizes, leaves, d_out, documents = make_inputs((16, 32), **SHAPES[shape])
    chosen = rule_named(rule, sizes)
    saved = run(sizes, leaves, d_out, documents, chosen)
    again = run(sizes, leaves, d_out, documents, chosen, recompute_rule=True)
    twice = run(sizes, leaves, d_out, documents, chosen, recompute_rule=True)
    assert all(torch.equal(a, b) for a, b in zip(again, twice, strict=True))
    if rule.split()[0] == "fla":
        assert all(torch.equal(a, b) for a, b in zip(saved, again, strict=True))
        return
    wide = [x.detach().double() for x in leaves]
    exact = run(
        sizes, wide, d_out, documents, rule_named("reference", sizes), kernels="torch"
    )
    found = errors(again, exact)
    usual = errors(saved, exact)
    for name, a, b, x in zip(NAMES, found, usual, exact, strict=True):
        print(f"{name}: {a:.2e}, without a second run {b:.2e}")
        assert a <= 1.2 * b * (1 + 2 * x.numel() ** -0.5), name


def test_a_new_packed_batch_does_not_wait_either():
    sizes, leaves, d_out, documents = make_inputs((16, 32), **SHAPES["packed"])
    rule = rule_named("flash_qla", sizes)
    run(sizes, leaves, d_out, documents, rule)
    fresh = Documents.from_cu_seqlens([0, 1, 3, 6, 69, 200, 1000], 1000, device="cuda")
    assert fresh.cu_seqlens.is_cuda and fresh.position_T.is_cuda  # made once, outside
    with waiting_refused():
        run(sizes, leaves, d_out, fresh, rule)


@pytest.mark.parametrize("rule", ["flash_qla", "flash_qla fp16"])
def test_no_kernel_of_flash_qla_sends_out_memory_unfenced(rule):
    sizes, leaves, d_out, documents = make_inputs((16, 32), **SHAPES["long"])
    run(sizes, leaves, d_out, documents, rule_named(rule, sizes))
    for stage, name in flash_qla_plan.KERNELS_WITHOUT_FENCES.items():
        module = sys.modules[
            getattr(flash_qla_plan.flash_qla_module(), stage).__module__
        ]
        kernels = getattr(module, name)._kernel_cache.values()
        assert kernels, name
        for kernel in kernels:
            source = kernel.get_kernel_source()
            assert "tl::tma_store(" in source and missing_fences(source) == [], name


def test_a_dropped_output_is_filled_again():
    sizes, leaves, d_out, documents = make_inputs((16, 32), S=333)
    rule = rule_named("auto", sizes)
    weight = torch.randn(
        4096, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True
    )

    def gradients(refilled):
        proj, conv, A_log, dt_bias, gamma = leaves
        mixed = gated_delta_mixer(
            proj,
            conv,
            None,
            A_log,
            dt_bias,
            sizes,
            rule=rule,
            norm=GatedNorm(gamma),
            refilled=refilled,
        )
        out = mixed @ weight
        if refilled is not None:
            refilled.drop_until_backward_of(out)
        return torch.autograd.grad(out.float().square().sum(), [weight, *leaves])

    for a, b in zip(gradients(None), gradients(RefilledOutput()), strict=True):
        assert torch.equal(a, b)
