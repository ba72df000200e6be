"""A checkpoint written at tp2 x cp2 is the same model at every other size, bit for bit."""

import pytest
import torch

from tests.distributed import model_laws as laws
from tests.distributed.layer_laws import require_same_bits


@pytest.mark.parametrize(
    ("bias", "conv_bias"),
    [
        pytest.param(bias, conv_bias, marks=[] if bias and conv_bias else pytest.mark.slow)
        for bias in (False, True)
        for conv_bias in (False, True)
    ],
)
def test_tp2_cp2_loads_at_tp1_tp2_and_pp2(pools, tmp_path, bias, conv_bias):
    options = {"bias": bias, "conv_bias": conv_bias}
    pools(4).run(laws.save, str(tmp_path), 2, 2, options)
    whole = pools(2).run(laws.load_and_gather, str(tmp_path), 1, 1, options)[0]
    assert not any(torch.isnan(value).any() for value in whole.values())
    assert whole["decoder.layers.0.self_attention.A_log"].dtype == torch.float32
    biases = ["in_proj.bias"] * bias + ["conv1d.bias"] * conv_bias
    expected = {f"decoder.layers.{n}.self_attention.{name}" for n in (0, 2) for name in biases}
    assert expected <= set(whole)

    for rank in pools(2).run(laws.load_and_gather, str(tmp_path), 2, 1, options):
        require_same_bits(rank, whole)
    stages = pools(2).run(laws.load_and_gather, str(tmp_path), 1, 2, options)
    require_same_bits({**stages[0], **stages[1]}, whole)


@pytest.mark.slow
def test_tp2_loads_at_tp4(pools, tmp_path):
    options = {"bias": True, "conv_bias": True}
    pools(2).run(laws.save, str(tmp_path), 2, 1, options)
    whole = pools(1).run(laws.load_and_gather, str(tmp_path), 1, 1, options)[0]
    for rank in pools(4).run(laws.load_and_gather, str(tmp_path), 4, 1, options):
        require_same_bits(rank, whole)
