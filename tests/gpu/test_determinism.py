"""On one GPU: the harness finds what is planted, and nothing in the layer's deterministic mode."""

import os

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from benchmarks.lib.invariance import check_batch_invariance
from benchmarks.lib.repeats import check_repeats
from megatron_gdn.gdn.rule import resolve_rule
from megatron_gdn.ops import Documents, recurrent_gated_delta_rule, torch_chunk_gated_delta_rule
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.parts import GatedNorm
from tests.gdn_mixer import gated_delta_mixer
from tests.ops.delta_rule.test_gated_delta_rule import (  # noqa: E402
    FP32,
    NAMES,
    OFFSETS,
    assert_agree,
    make_inputs,
    outputs_and_gradients,
)

pytestmark = pytest.mark.gpu

SIZES = HeadSizes(16, 32, 128, 128)
LENGTHS = (932, 63, 1, 1052)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


def mixer(backend):
    rule = resolve_rule(
        backend, device="cuda", dtype=torch.bfloat16, sizes=SIZES, deterministic=True
    ).rule
    leaves = [normal(SIZES.layout.conv_width, 1, 4, seed=0) * 0.3, torch.rand(32, device="cuda"),
              torch.ones(32, device="cuda"), torch.ones(128, device="cuda")]  # fmt: skip
    conv, A_log, dt_bias, gamma = (x.requires_grad_() for x in leaves)

    def run(x, offsets=None, d_out=None):
        x = x.detach().requires_grad_()
        documents = None
        if offsets is not None:
            documents = Documents.from_cu_seqlens(offsets, len(x), device="cuda")
        out = gated_delta_mixer(
            x, conv, None, A_log, dt_bias, SIZES,
            rule=rule, norm=GatedNorm(gamma), documents=documents,
        )  # fmt: skip
        if d_out is None:
            d_out = normal(*out.shape, seed=3)
        grads = torch.autograd.grad(out, [gamma, x, conv, A_log, dt_bias], d_out)
        names = ("d_gamma", "dx", "d_conv", "d_A_log", "d_dt_bias")
        return {"output": out.detach(), **dict(zip(names, grads, strict=True))}

    return run


BACKENDS = pytest.mark.parametrize("backend", ["auto", "reference"])


@BACKENDS
@pytest.mark.parametrize("offsets", [None, [0, 932, 995, 996, 2048]], ids=["dense", "packed"])
def test_the_mixer_repeats_under_torchs_switch(deterministic, backend, offsets):
    run, x = mixer(backend), normal(2048, 1, SIZES.layout.width, seed=1)
    report = check_repeats(lambda: run(x, offsets), 20)
    assert report.equal, report


@BACKENDS
def test_a_document_has_the_same_bits_among_others(deterministic, backend):
    run = mixer(backend)

    def tokens_only(x, offsets, d_out):
        results = run(x, offsets, d_out)
        return {name: results[name] for name in ("output", "dx")}

    found = check_batch_invariance(
        tokens_only,
        [normal(n, 1, SIZES.layout.width, seed=n) for n in LENGTHS],
        [normal(n, 1, 32 * 128, seed=n + 1) for n in LENGTHS],
    )
    assert found == [], "\n".join(map(str, found))


@pytest.mark.parametrize("decay", [0.0, 1.0, 16.0])
@pytest.mark.parametrize("tf32", ["highest", "high"])
def test_the_plain_rule_agrees_with_the_fp64_recurrence(decay, tf32):
    inputs = [x.cuda() for x in make_inputs(1, 300, 3, 6, 16, 8, decay, 6, torch.float32)]
    expected = outputs_and_gradients(
        recurrent_gated_delta_rule, [x.double() for x in inputs], OFFSETS
    )
    torch.set_float32_matmul_precision(tf32)
    try:
        actual = outputs_and_gradients(torch_chunk_gated_delta_rule, inputs, OFFSETS)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert_agree(actual, expected, FP32)
    assert set(actual) == set(NAMES)
