"""Heads of multi-token prediction of M, G and * layers: every layout takes the same steps."""

import pytest

from tests.distributed import mtp_laws as laws
from tests.parallel import assert_close


@pytest.fixture(scope="module")
def weights(pools, tmp_path_factory):
    """A folder with the weights that every run begins with."""
    folder = str(tmp_path_factory.mktemp("weights"))
    keys = pools(1).run(laws.save, folder)[0]
    head = "mtp.layers.1.mtp_model_layer.layers"
    assert {  # as Megatron names them over Transformer Engine
        "mtp.layers.1.enorm.weight",
        "mtp.layers.1.eh_proj.weight",
        "mtp.layers.1.final_layernorm.weight",
        f"{head}.0.mixer.in_proj.weight.dt",
        f"{head}.0.mixer.in_proj.layer_norm_weight",
        f"{head}.1.self_attention.linear_qkv.layer_norm_weight",
    } <= keys
    return folder


@pytest.fixture(scope="module")
def one_rank(pools, weights):
    """Losses and gradients of one rank, by kind of batch."""
    return {
        kind: pools(1).run(laws.trained, weights, kind)[0] for kind in ("batch", "packed", "alone")
    }


def assert_same(found, expected) -> None:
    """fp32 through eight layers, in another order of sums over at most 128 tokens."""
    assert found[0] == pytest.approx(expected[0], rel=2e-5)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert gradient.abs().max() > 0, name
        got = found[1][name]
        if got.dim() == 0:  # the square of what tensor-parallel ranks share
            gradient = gradient.double().square().sum()
        assert_close(name, got, gradient, 1e-4)


def test_a_model_with_heads_learns(one_rank):
    for losses, _ in one_rank.values():
        assert losses[-1] < losses[0] - 0.01


def test_packed_documents_train_heads_as_documents_alone(one_rank):
    """No token of a head sees, and no label is, a token of another document."""
    assert_same(one_rank["packed"], one_rank["alone"])


@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
@pytest.mark.parametrize("kind", ["batch", "packed"])
def test_two_context_parallel_ranks_equal_one(pools, weights, one_rank, kind, mode):
    for found in pools(2).run(laws.trained, weights, kind, cp=2, linear_cp_mode=mode):
        assert_same(found, one_rank[kind])


def test_two_tensor_parallel_ranks_load_the_checkpoint_and_equal_one(pools, weights, one_rank):
    for found in pools(2).run(laws.trained, weights, "packed", tp=2, sequence_parallel=True):
        assert_same(found, one_rank["packed"])


def test_what_megatron_would_shift_wrongly_is_refused(pools):
    pools(2).run(laws.refusals)
