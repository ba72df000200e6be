"""torch's FSDP2 replaces parameters by casts of them: fp32 goes through, rounded gates
do not."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
)
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from megatron_gdn.mixers.precision import fully_shard as shard_apart
from tests.distributed.layer_laws import layer_with, randomise_
from tests.distributed.mixers import BY_NAME, GDN
from tests.distributed.test_loader_layout import launched_with
from tests.gpu import fsdp_laws
from tests.parallel import (
    VOCABULARY,
    alone,
    assert_close,
    groups_of_megatron,
    make_config,
    parallel,
    share_of,
)
from tests.ranks import on_ranks


def _layer():
    """The same random layer on every rank, without tensor or context parallelism."""
    return GDN.whole(make_config())


def _under_megatrons_wrapper(dtype: torch.dtype, offset: float = 0.0):
    """A hybrid model under ``--use-torch-fsdp2``, and Megatron's optimizer of it.

    The group is that of the other laws: DTensor takes meshes of the same ranks for one
    another, and Megatron refuses gradients of two groups.
    """
    bf16 = dtype == torch.bfloat16
    kind = {"transformer_impl": "local", "use_cpu_initialization": True}
    model = fsdp_laws.build(dtype, "G-M-", **kind)
    model = Float16Module(model.config, model) if bf16 else model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(offset)
    settings = DistributedDataParallelConfig()
    world = dist.group.WORLD
    wrapped = TorchFullyShardedDataParallel(
        model.config, settings, model, process_group=world
    )
    adam = OptimizerConfig(
        optimizer="adam", lr=1e-2, clip_grad=0.0, bf16=bf16, params_dtype=dtype
    )
    return wrapped, get_megatron_optimizer(adam, [wrapped])


def _losses(model, optimizer, steps: range):
    positions = torch.arange(16).expand(2, -1)
    for step in steps:
        torch.manual_seed(50 + 10 * step + dist.get_rank())
        tokens = torch.randint(VOCABULARY, (2, 17))
        losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        losses.float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield losses.detach()


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize(
    "called", [False, True], ids=["fused norm", "norm as a module"]
)
@on_ranks(4, tp=2)
def test_with_tensor_parallelism_it_equals_one_rank(called, sequence_parallel):
    """tp2 x dp2: what fully_shard makes of the parameters has neither hooks nor
    attributes."""
    groups = groups_of_megatron()
    torch.manual_seed(7)
    one = layer_with(make_config(), alone(), called)
    randomise_(one)
    config = make_config(
        tensor_model_parallel_size=2, sequence_parallel=sequence_parallel
    )
    layer = layer_with(config, groups, called)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(share_of(name, one.get_parameter(name), layer))
    x_all = torch.randn(2, 10, 1, 24)
    torch.stack([one(x, None)[0].square().sum() for x in x_all]).mean().backward()

    replicas = parallel_state.get_data_parallel_group()
    fully_shard(layer, mesh=DeviceMesh.from_group(replicas, "cpu"))
    x = x_all[replicas.rank()]
    x = x.chunk(2)[groups.tp.rank()] if sequence_parallel else x
    layer(x, None)[0].square().sum().backward()
    # then the sum over tp is Megatron's, for all norms of a model
    if sequence_parallel:
        layer.ddp_config = DistributedDataParallelConfig()
        _allreduce_non_tensor_model_parallel_grads([layer], config)
    for name, parameter in layer.named_parameters():
        expected = share_of(name, one.get_parameter(name).grad, layer)
        assert_close(
            f"gradient of {name}", parameter.grad.full_tensor(), expected, 1e-5
        )


@on_ranks(4, tp=2)
def test_with_tensor_parallelism_a_norm_sharded_by_itself_is_refused():
    """The layer reads its parameters before their hooks gather them, so it sees the
    change."""
    config = make_config(tensor_model_parallel_size=2)
    layer = layer_with(config, groups_of_megatron(), called=False)
    mesh = DeviceMesh.from_group(parallel_state.get_data_parallel_group(), "cpu")
    for module in (layer.out_norm, layer):
        fully_shard(module, mesh=mesh)
    said = "(?s)weight changed during the forward.*shard the whole GatedDeltaNet"
    with pytest.raises(RuntimeError, match=said):
        layer(torch.randn(9, 1, 24), None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@on_ranks(2, cp=1)
def test_a_policy_that_rounds_the_gates_is_refused(dtype):
    layer = _layer()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    fully_shard(
        layer, mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"), mp_policy=policy
    )
    said = (
        f"(?s)A_log reached the layer in {dtype}.*MixedPrecisionPolicy without "
        "param_dtype"
    )
    with pytest.raises(ValueError, match=said):
        layer(torch.randn(9, 1, 24), None)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("ranks", "tp", "sequence_parallel"),
    [(2, 1, False), (4, 2, False), (4, 2, True)],
    ids=["", "tp", "sp"],
)
@pytest.mark.parametrize("mixer", ["gdn", "mamba2"])
@on_ranks("ranks")
def test_a_bf16_layer_with_fp32_gates_equals_the_unsharded_layer_to_the_bit(
    mixer, ranks, tp, sequence_parallel
):
    """Output, gradients (means of two, rounded once) and a step; each replica has its
    rows."""
    _clear_sharding_prop_cache()  # it names groups that have ended
    with parallel(tp=tp):
        groups = groups_of_megatron()
        replicas = parallel_state.get_data_parallel_group()
        # see _under_megatrons_wrapper
        replicas = dist.group.WORLD if tp == 1 else replicas
        mixers = BY_NAME[mixer]
        bf16 = {"bf16": True, "params_dtype": torch.bfloat16}
        whole = mixers.whole(mixers.config(**bf16))
        sizes = {
            "tensor_model_parallel_size": tp,
            "sequence_parallel": sequence_parallel,
        }
        config = mixers.config(**bf16, **sizes)
        one, layer = (mixers.build(config, groups) for _ in range(2))
        for each in (one, layer):
            mixers.copy_shares(each, whole)
        assert {p.dtype for p in layer.parameters()} == {torch.bfloat16, torch.float32}
        shard_apart(layer, mesh=DeviceMesh.from_group(replicas, "cpu"))
        optimizers = [
            torch.optim.Adam(module.parameters(), lr=1e-2) for module in (one, layer)
        ]
        for step in range(2):
            torch.manual_seed(50 + 2 * step + replicas.rank())
            x = torch.randn(10, 1, config.hidden_size, dtype=torch.bfloat16)
            x = x.chunk(tp)[groups.tp.rank()] if sequence_parallel else x
            expected = one(x, None)[0]
            out = layer(x, None)[0]
            assert torch.equal(out, expected)
            for y in (expected, out):
                y.float().square().sum().backward()
            assert (
                dict(layer.named_parameters()).keys()
                == dict(one.named_parameters()).keys()
            )
            assert layer.state_dict().keys() == one.state_dict().keys()
            for name, parameter in one.named_parameters():
                dist.all_reduce(parameter.grad, group=replicas)
                parameter.grad /= replicas.size()
                sharded = layer.get_parameter(name)
                assert sharded.dtype == sharded.grad.dtype == parameter.dtype, name
                assert torch.equal(sharded.grad.full_tensor(), parameter.grad), name
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for name, parameter in one.named_parameters():
                assert torch.equal(
                    layer.get_parameter(name).full_tensor(), parameter
                ), name


@on_ranks(2, cp=1)
def test_a_policy_that_rounds_weights_leaves_gates_that_stand_apart():
    """A policy that rounds the weights of an fp32 layer leaves the gates as they
    are."""
    one = _layer().bfloat16()
    layer = _layer()
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    shard_apart(
        layer, mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"), mp_policy=policy
    )
    x = torch.randn(9, 1, 24)
    assert torch.equal(layer(x, None)[0], one(x.bfloat16(), None)[0])


@pytest.mark.parametrize("mixer", BY_NAME)
@on_ranks(2, cp=1)
def test_a_sharded_layer_follows_its_parameters_into_other_memory(mixer):
    """A cast to bf16 leaves the gates; what is written after `to_empty`, as after the
    meta device, counts."""
    mixers = BY_NAME[mixer]
    one, layer = (mixers.whole(mixers.config()) for _ in range(2))
    gates = {name: one.get_parameter(name).clone() for name in mixers.fp32}
    shard_apart(layer, mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"))
    x = torch.randn(9, 1, one.config.hidden_size, dtype=torch.float64)
    for each in (one, layer):
        each.bfloat16().double()
        each(x)  # the first forward reads the shards' addresses
        values = [1.25 * parameter.detach() for parameter in each.double().parameters()]
        each.to_empty(device="cpu")
        for parameter, value in zip(each.parameters(), values, strict=True):
            parameter.data.copy_(value)
    assert torch.equal(layer(x)[0], one(x)[0])
    for name, gate in gates.items():
        whole = layer.get_parameter(name).full_tensor()
        assert torch.equal(whole, 1.25 * gate.double()), name


class Each(nn.Module):
    """The output of each layer; torch's FSDP2 runs models of one root alone."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        return [layer(x, None)[0] for layer in self.layers]


@on_ranks(2, cp=1)
def test_lists_and_parameters_that_are_ignored_are_as_in_torch():
    """And a mixer that torch has sharded already stays as it is."""
    one = _layer()
    layers = [_layer() for _ in range(3)]
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    fully_shard(layers[0], mesh=mesh)
    ignored = layers[1].out_proj.weight
    model = Each(*layers)
    for part in (layers[1:], model):
        shard_apart(part, mesh=mesh, ignored_params={ignored})
    assert layers[0].gather_fp32 is None
    assert layers[1].out_proj.weight is ignored
    for layer in layers[1:]:
        names = {n for n, p in layer.named_parameters() if isinstance(p, DTensor)}
        whole = {"out_proj.weight"} if layer is layers[1] else set()
        assert names == dict(one.named_parameters()).keys() - whole
        assert layer.gather_fp32 is not None
    x = torch.randn(9, 1, 24)
    expected, _ = one(x, None)
    assert all(torch.equal(out, expected) for out in model(x))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@on_ranks(2)
def test_a_run_goes_on_from_a_torch_dcp_file(tmp_path, dtype):
    """To the bit, into a model of other weights; the calls of Megatron's script."""
    with parallel(), fsdp_laws.on_this_device():
        model, optimizer = _under_megatrons_wrapper(dtype)
        list(_losses(model, optimizer, range(2)))
        stored = {"model": model.state_dict_for_save_checkpoint()}
        checkpoint.save(
            {**stored, "optimizer": optimizer.state_dict()}, checkpoint_id=str(tmp_path)
        )
        expected = list(_losses(model, optimizer, range(2, 4)))

        model, optimizer = _under_megatrons_wrapper(dtype, offset=1.0)
        loaded = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(is_loading=True),
        }
        checkpoint.load(loaded, checkpoint_id=str(tmp_path))
        optimizer.load_state_dict(loaded["optimizer"])
        found = list(_losses(model, optimizer, range(2, 4)))
        assert all(map(torch.equal, found, expected))


@on_ranks(2, cp=1)
def test_torch_dist_is_refused_before_the_first_step_and_a_format_that_works_is_named(
    tmp_path,
):
    """At the first save; and before the first step, in a launch that will save."""
    flags = ("--use-torch-fsdp2", "--save", str(tmp_path))
    with fsdp_laws.on_this_device():
        model, _ = _under_megatrons_wrapper(torch.float32)
        with pytest.raises(ValueError, match="in_proj.weight") as at_the_save:
            model.module.sharded_state_dict()
        with launched_with(*flags), pytest.raises(ValueError) as at_the_start:
            _under_megatrons_wrapper(torch.float32)
        assert f"--save {tmp_path}" in str(at_the_start.value)
        for refused in (at_the_save, at_the_start):
            assert "Give --ckpt-format torch_dcp" in str(refused.value)
            assert "--use-distributed-optimizer in place of" in str(refused.value)
        with launched_with(*flags, "--ckpt-format", "torch_dcp"):
            _under_megatrons_wrapper(torch.float32)
