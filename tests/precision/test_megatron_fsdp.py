"""Megatron-FSDP over gloo: parameters of one dtype train as under DDP, of two are
refused."""

from functools import cache, partial
from importlib.util import find_spec

import pytest
import torch
from megatron.core.distributed.fsdp import mcore_fsdp_adapter

from tests.gpu import fsdp_laws as laws

BF16 = torch.bfloat16
FP32 = torch.float32
PACKAGES = [
    pytest.param(laws.MEGATRONS_COPY, id="megatron-core's copy"),
    pytest.param(
        "megatron_fsdp",
        id="megatron-fsdp",
        marks=pytest.mark.skipif(
            find_spec("megatron_fsdp") is None, reason="not installed"
        ),
    ),
]


slow = pytest.mark.slow
nightly = pytest.mark.nightly


@pytest.fixture(scope="module")
def ddp(pools):
    """``ddp(*arguments of laws.losses)``: what two ranks lose without FSDP."""
    return cache(partial(pools(2).run, laws.losses, "ddp"))


@pytest.fixture(scope="module")
def ddp_over_four(pools):
    """``ddp_over_four(pattern)``: what four ranks lose in fp32 without FSDP, tp 2."""
    return cache(lambda pattern: pools(4).run(laws.losses, "ddp", FP32, pattern, tp=2))


@pytest.fixture(scope="module")
def saved(pools, tmp_path_factory):
    """``saved(split, tp, pattern, upstream)``: a checkpoint, and the losses after
    it."""

    @cache
    def save(split: bool, tp: int, pattern: str, upstream: bool):
        folder = str(tmp_path_factory.mktemp("saved"))
        found = pools(2 * tp).run(
            laws.losses_after_a_save, folder, split, tp, pattern, upstream
        )
        return folder, found

    return save


@slow
@pytest.mark.parametrize(
    ("pattern", "strategies", "norms_called"),
    [
        ("G-", ["optim_grads_params"], False),
        ("G-", ["optim_grads"], True),
        ("M-", ["optim_grads_params"], False),
        pytest.param("G-", ["no_shard", "optim", "optim_grads"], False, marks=slow),
        pytest.param("M-", ["no_shard", "optim", "optim_grads"], False, marks=nightly),
    ],
)
def test_with_tensor_parallelism_every_strategy_trains_as_ddp(
    pools, ddp_over_four, pattern, strategies, norms_called
):
    """tp 2 x dp 2."""
    for strategy in strategies:
        fsdp = pools(4).run(
            laws.losses, "fsdp", FP32, pattern, strategy, 2, norms_called
        )
        laws.require_exact_in_fp32(ddp_over_four(pattern), fsdp)


@slow
@pytest.mark.each_value
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim_grads"])
@pytest.mark.parametrize("pattern", ["G-", "M-"], ids=["gdn", "mamba2"])
def test_a_model_of_the_meta_device_trains_as_one_built_here(pools, pattern, strategy):
    """Megatron-FSDP resets every module that has a parameter on the meta device."""
    here, meta = (
        pools(2).run(laws.losses_of_a_model_built_on, device, pattern, strategy)
        for device in ("cpu", "meta")
    )
    assert torch.stack(here).isfinite().all()
    assert all(map(torch.equal, meta, here))


# Megatron 0.18 does not gather the parameters of a Mamba layer together.
GATHERED = ["G-", "M-"] if hasattr(mcore_fsdp_adapter, "MambaLayer") else ["G-"]


@pytest.mark.parametrize("pattern", GATHERED, ids={"G-": "gdn", "M-": "mamba2"}.get)
def test_fp32_gates_in_a_bf16_model_are_refused_by_name(pools, pattern):
    for message in pools(2).run(laws.refusal, BF16, pattern):
        assert "Megatron-FSDP" in message and "dt_bias (torch.float32)" in message
        assert "torch.bfloat16 and torch.float32" in message and "gloo" in message
        assert "nccl" in message and "data_parallel_sharding_strategy" in message


@slow
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads"])
def test_where_parameters_are_gathered_by_dtype_they_are_taken(pools, ddp, strategy):
    fsdp = pools(2).run(laws.losses, "fsdp", BF16, strategy=strategy)
    laws.require_as_exact_as_ddp(ddp(FP32), ddp(BF16), fsdp)


@slow
def test_it_is_gloos_one_gather_of_two_dtypes_that_is_wrong(pools, ddp):
    """Gathered one by one they train as under DDP; once both do, the refusal can go."""
    run = pools(2).run
    both = (ddp(FP32), ddp(BF16))
    laws.require_as_exact_as_ddp(*both, run(laws.losses_one_gather_at_a_time, BF16))
    with pytest.raises(AssertionError):
        laws.require_as_exact_as_ddp(*both, run(laws.losses_if_accepted, BF16))


def test_torch_reduces_a_joined_collective_as_its_first_tensor(pools):
    """A sum, then a maximum, of 1 and 2: both are sums."""
    for found in pools(2).run(laws.reduced_together):
        assert found.tolist() == [3.0, 3.0]


def test_layers_of_two_dtypes_divide_gradients_before_their_sum(pools):
    """gloo, like torch's joined collectives, cannot divide within the sum.

    A bf16 gradient has a relative error of at most 2**-9 before the sum and after it.
    """
    pool = pools(2)
    ddp = pool.run(laws.gradient_norm, "ddp")
    fsdp = pool.run(laws.gradient_norm_as_over_nccl)
    torch.testing.assert_close(fsdp, ddp, rtol=2**-7, atol=0)


@slow
@pytest.mark.parametrize("package", PACKAGES)
def test_fully_shard_trains_an_fp32_model_as_summed_gradients_do(pools, package):
    pool = pools(2)
    whole = pool.run(laws.losses_of_a_package, "none", FP32, laws.PATTERN, "")
    # On the meta device the package refuses "no_shard".
    for how in (("no_shard", "cpu"), ("optim", "meta"), ("optim_grads_params", "meta")):
        fsdp = pool.run(laws.losses_of_a_package, package, FP32, laws.PATTERN, *how)
        laws.require_exact_in_fp32(whole, fsdp)


@slow
@pytest.mark.parametrize("package", PACKAGES)
def test_fully_shard_takes_a_bf16_model_where_dtypes_are_gathered_apart(pools, package):
    pool = pools(2)
    truth = pool.run(
        laws.losses_of_a_package, "none", FP32, laws.PATTERN, "", rounded=True
    )
    whole = pool.run(laws.losses_of_a_package, "none", BF16, laws.PATTERN, "")
    fsdp = pool.run(
        laws.losses_of_a_package, package, BF16, laws.PATTERN, "optim_grads"
    )
    laws.require_as_exact_as_ddp(truth, whole, fsdp)
    for message in pool.run(laws.refusal, BF16, laws.PATTERN, package):
        assert "Megatron-FSDP" in message and "dt_bias (torch.float32)" in message
        assert "no fsdp_unit_modules" in message


WEIGHT = "model.module.decoder.layers.0.self_attention.in_proj.weight."


@slow
@pytest.mark.parametrize(
    ("split", "tp"),
    [
        (False, 1),
        pytest.param(True, 2, marks=slow),
        *(pytest.param(*x, marks=nightly) for x in ((True, 1), (False, 2))),
    ],
)
def test_a_run_goes_on_from_an_fsdp_dtensor_checkpoint(pools, saved, split, tp):
    """To the bit, in bf16; Megatron's dev stores sections, core_r0.19.0 and main do
    not."""
    folder, losses = saved(split, tp, laws.PATTERN, False)
    loaded = pools(2 * tp).run(laws.losses_after_a_load, folder, split, tp)
    assert all(map(torch.equal, loaded, losses))
    found = {
        key.split(".in_proj.weight.")[1]
        for key in laws.keys_of(folder)
        if WEIGHT in key
    }
    assert found == (
        {"query", "key", "value", "z", "beta", "alpha"} if split else set()
    )


@slow
def test_an_fsdp_dtensor_checkpoint_by_section_loads_at_another_tensor_parallel_size(
    pools, ddp, saved
):
    """To bf16's error; a tensor-parallel rank holds rows of each section, not one run
    of rows."""
    folder, losses = saved(True, 1, "G-", False)
    loaded = pools(4).run(laws.losses_after_a_load, folder, True, tp=2, pattern="G-")
    laws.require_as_exact_as_ddp([x[1:] for x in ddp(FP32, "G-")], losses, loaded[::2])


@slow
@pytest.mark.each_value
@pytest.mark.parametrize(
    ("pattern", "split"),
    [("G-", False), ("M-", True), ("M-", False)],
    ids=["gdn whole", "mamba2 by section", "mamba2 whole"],
)
def test_rows_of_another_tensor_parallel_size_are_refused(pools, saved, pattern, split):
    """One tensor of the same shape, its rows in another order: torch loads it without
    an error."""
    folder, _ = saved(split, 1, pattern, False)
    for message in pools(4).run(laws.refusal_of_a_load, folder, split, 2, pattern):
        assert (
            "self_attention.in_proj.weight" in message
            or "mixer.in_proj.weight" in message
        )
        assert "in the order of tensor_model_parallel_size=1" in message
        assert "Load it with --tensor-model-parallel-size 1" in message


@slow
@pytest.mark.parametrize("written_by_section", [True, False])
def test_sections_are_not_taken_for_the_whole(pools, saved, written_by_section):
    """Under ``--no-strict-fsdp-dtensor-load`` torch leaves weights that it misses as
    they are."""
    folder, _ = saved(written_by_section, 1, "G-", False)
    for message in pools(2).run(
        laws.refusal_of_a_load, folder, not written_by_section, 1, "G-"
    ):
        assert "each section by itself" in message
        assert "Load it with" in message


@slow
@pytest.mark.parametrize("reader", ["ours", "upstream"])
def test_a_run_goes_on_from_the_other_layers_fsdp_dtensor_checkpoint(
    pools, ddp, saved, reader
):
    """bf16's error: Megatron's layer rounds A_log. Its files do not say how rows lie in
    them."""
    wrote = reader == "ours"
    folder, losses = saved(False, 1, "G-", wrote)
    loaded = pools(2).run(laws.losses_after_a_load, folder, False, 1, "G-", not wrote)
    laws.require_as_exact_as_ddp([x[1:] for x in ddp(FP32, "G-")], losses, loaded)
