"""Run on every rank: the layer under torch's fully_shard (FSDP2)."""

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
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from megatron_gdn.mixers.fully_sharded import fully_shard as shard_apart
from tests import mamba_mixers
from tests.distributed.layer_laws import build_layer, randomise_
from tests.distributed.loader_layout_laws import launched_with
from tests.distributed.mark_laws import layer_with
from tests.gpu import fsdp_laws
from tests.parallel import assert_close, group_of_one, make_config, parallel, share_of


def _layer():
    """The same random layer on every rank, without tensor or context parallelism."""
    alone = ProcessGroupCollection(tp=group_of_one(), cp=group_of_one())
    torch.manual_seed(7)
    layer = build_layer(make_config(), alone, {})
    randomise_(layer)
    return layer


def _shard(layer, **policy) -> None:
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))


def _bf16(mixer: str):
    """The same random bf16 layer with fp32 gates on every rank."""
    alone = ProcessGroupCollection(tp=group_of_one(), cp=group_of_one())
    kind = {"bf16": True, "params_dtype": torch.bfloat16}
    if mixer == "mamba2":
        return mamba_mixers.whole_mixer(mamba_mixers.mamba_config(**kind))
    torch.manual_seed(7)
    layer = build_layer(make_config(**kind), alone, {})
    randomise_(layer)
    return layer


def fp32_equals_one_rank() -> None:
    """Every rank has rows of its own; gradients are averaged over them."""
    size, rank = dist.get_world_size(), dist.get_rank()
    with parallel():
        one, layer = _layer(), _layer()
        _shard(layer)
        x_all = torch.randn(size, 9, 1, 24)
        expected = one(x_all[rank], None)[0]
        torch.stack([one(x, None)[0].square().sum() for x in x_all]).mean().backward()
        out, _ = layer(x_all[rank], None)
        out.square().sum().backward()
        assert_close("output", out, expected, 1e-6)
        for name, parameter in layer.named_parameters():
            gradient = parameter.grad.full_tensor()
            assert gradient.dtype == torch.float32
            assert_close(f"gradient of {name}", gradient, one.get_parameter(name).grad, 1e-5)


def tensor_parallel_equals_one_rank(called: bool, sequence_parallel: bool) -> None:
    """tp2 x dp2: what fully_shard makes of the parameters has neither hooks nor attributes."""
    with parallel(tp=2):
        alone = ProcessGroupCollection(tp=group_of_one(), cp=group_of_one())
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        torch.manual_seed(7)
        one = layer_with(make_config(), alone, called)
        randomise_(one)
        config = make_config(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
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
        if sequence_parallel:  # then the sum over tp is Megatron's, for all norms of a model
            layer.ddp_config = DistributedDataParallelConfig()
            _allreduce_non_tensor_model_parallel_grads([layer], config)
        for name, parameter in layer.named_parameters():
            expected = share_of(name, one.get_parameter(name).grad, layer)
            assert_close(f"gradient of {name}", parameter.grad.full_tensor(), expected, 1e-5)


def refusal_of_a_norm_sharded_by_itself() -> str:
    """The layer reads its parameters before their hooks gather them, so it sees the change."""
    with parallel(tp=2):
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        layer = layer_with(make_config(tensor_model_parallel_size=2), groups, called=False)
        mesh = DeviceMesh.from_group(parallel_state.get_data_parallel_group(), "cpu")
        for module in (layer.out_norm, layer):
            fully_shard(module, mesh=mesh)
        try:
            layer(torch.randn(9, 1, 24), None)
        except RuntimeError as error:
            return str(error)
        return "accepted"


def refusal_of(dtype: torch.dtype) -> str:
    """What the first forward says under a policy that casts the parameters to ``dtype``."""
    with parallel():
        layer = _layer()
        _shard(layer, param_dtype=dtype, reduce_dtype=torch.float32)
        try:
            layer(torch.randn(9, 1, 24), None)
        except ValueError as error:
            return str(error)
        return "accepted"


def equals_unsharded(mixer: str) -> None:
    """In bf16, to the bit: output, gradients and a step; every rank has rows of its own.

    Each gradient is the mean of two, which is rounded once, in whatever order they are added.
    """
    with parallel():
        one, layer = _bf16(mixer), _bf16(mixer)
        assert {p.dtype for p in layer.parameters()} == {torch.bfloat16, torch.float32}
        shard_apart(layer, mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"))
        optimizers = [torch.optim.Adam(module.parameters(), lr=1e-2) for module in (one, layer)]
        for step in range(2):
            torch.manual_seed(50 + 2 * step + dist.get_rank())
            x = torch.randn(9, 1, layer.config.hidden_size, dtype=torch.bfloat16)
            expected, out = one(x, None)[0], layer(x, None)[0]
            assert torch.equal(out, expected)
            for y in (expected, out):
                y.float().square().sum().backward()
            assert dict(layer.named_parameters()).keys() == dict(one.named_parameters()).keys()
            assert layer.state_dict().keys() == one.state_dict().keys()
            for name, whole in one.named_parameters():
                dist.all_reduce(whole.grad)
                whole.grad /= dist.get_world_size()
                sharded = layer.get_parameter(name)
                assert sharded.dtype == sharded.grad.dtype == whole.dtype, name
                assert torch.equal(sharded.grad.full_tensor(), whole.grad), name
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for name, whole in one.named_parameters():
                assert torch.equal(layer.get_parameter(name).full_tensor(), whole), name


def a_policy_equals_a_cast() -> None:
    """A policy that rounds the weights of an fp32 layer leaves the gates as they are."""
    with parallel():
        one, layer = _layer().bfloat16(), _layer()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard_apart(layer, mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"), mp_policy=policy)
        x = torch.randn(9, 1, 24)
        assert torch.equal(layer(x, None)[0], one(x.bfloat16(), None)[0])


def bf16_tensor_parallel_equals_unsharded(mixer: str, sequence_parallel: bool) -> None:
    """tp 2 x dp 2, in bf16, to the bit: every gradient is the mean of two replicas'."""
    kind = {
        "bf16": True, "params_dtype": torch.bfloat16,
        "tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel,
    }  # fmt: skip
    _clear_sharding_prop_cache()  # it names groups that have ended
    with parallel(tp=2):
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        replicas = parallel_state.get_data_parallel_group()
        whole = _bf16(mixer)
        one, layer = (
            mamba_mixers.build(mamba_mixers.mamba_config(**kind), groups)
            if mixer == "mamba2"
            else build_layer(make_config(**kind), groups, {})
            for _ in range(2)
        )
        share = mamba_mixers.share_of if mixer == "mamba2" else share_of
        with torch.no_grad():
            for each in (one, layer):
                for name, parameter in each.named_parameters():
                    parameter.copy_(share(name, whole.get_parameter(name), each))
        shard_apart(layer, mesh=DeviceMesh.from_group(replicas, "cpu"))
        torch.manual_seed(50 + replicas.rank())
        x = torch.randn(10, 1, layer.config.hidden_size, dtype=torch.bfloat16)
        x = x.chunk(2)[groups.tp.rank()] if sequence_parallel else x
        expected, out = one(x, None)[0], layer(x, None)[0]
        assert torch.equal(out, expected)
        for y in (expected, out):
            y.float().square().sum().backward()
        for name, alone in one.named_parameters():
            dist.all_reduce(alone.grad, group=replicas)
            alone.grad /= replicas.size()
            sharded = layer.get_parameter(name)
            assert sharded.dtype == sharded.grad.dtype == alone.dtype, name
            assert torch.equal(sharded.grad.full_tensor(), alone.grad), name


def _under_megatrons_wrapper(dtype: torch.dtype, offset: float = 0.0):
    """A hybrid model under ``--use-torch-fsdp2``, and Megatron's optimizer of it.

    The group is that of the other laws: DTensor takes meshes of the same ranks for one another, and
    Megatron refuses gradients of two groups.
    """
    settings, half = DistributedDataParallelConfig(), dtype == torch.bfloat16
    kind = {"transformer_impl": "local", "use_cpu_initialization": True}
    model = fsdp_laws.build(dtype, "G-M-", **kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(offset)
    model = Float16Module(model.config, model) if half else model
    wrapped = TorchFullyShardedDataParallel(
        model.config, settings, model, process_group=dist.group.WORLD
    )
    adam = OptimizerConfig(optimizer="adam", lr=1e-2, bf16=half, params_dtype=dtype, clip_grad=0.0)
    return wrapped, get_megatron_optimizer(adam, [wrapped])


def _losses(model, optimizer, steps: range):
    positions = torch.arange(16).expand(2, -1)
    for step in steps:
        torch.manual_seed(50 + 10 * step + dist.get_rank())
        tokens = torch.randint(fsdp_laws.VOCABULARY, (2, 17))
        losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        losses.float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield losses.detach()


def a_run_goes_on_from_a_torch_dcp_file(folder: str, dtype: torch.dtype) -> None:
    """To the bit, into a model of other weights; the calls of Megatron's script."""
    with parallel(), fsdp_laws.on_this_device():
        model, optimizer = _under_megatrons_wrapper(dtype)
        list(_losses(model, optimizer, range(2)))
        stored = {"model": model.state_dict_for_save_checkpoint()}
        checkpoint.save({**stored, "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
        expected = list(_losses(model, optimizer, range(2, 4)))

        model, optimizer = _under_megatrons_wrapper(dtype, offset=1.0)
        loaded = {"model": model.state_dict(), "optimizer": optimizer.state_dict(is_loading=True)}
        checkpoint.load(loaded, checkpoint_id=folder)
        optimizer.load_state_dict(loaded["optimizer"])
        found = list(_losses(model, optimizer, range(2, 4)))
        assert all(map(torch.equal, found, expected))


def refusals_of_torch_dist(folder: str) -> list[str]:
    """At the first save; and before the first step, in a launch that will save."""
    said = []
    with parallel(), fsdp_laws.on_this_device():
        model, _ = _under_megatrons_wrapper(torch.float32)
        with pytest.raises(ValueError) as at_the_save:
            model.module.sharded_state_dict()
        said.append(str(at_the_save.value))
        with launched_with("--use-torch-fsdp2", "--save", folder):
            with pytest.raises(ValueError) as at_the_start:
                _under_megatrons_wrapper(torch.float32)
            said.append(str(at_the_start.value))
        with launched_with("--use-torch-fsdp2", "--save", folder, "--ckpt-format", "torch_dcp"):
            _under_megatrons_wrapper(torch.float32)
    return said


def megatrons_wrapper_equals_unsharded() -> None:
    """A bf16 model under ``--use-torch-fsdp2``: losses, gradients and a step to the bit."""
    kind = {"transformer_impl": "local", "use_cpu_initialization": True}
    with parallel(), fsdp_laws.on_this_device():
        one, model = (
            Float16Module(m.config, m)
            for m in (fsdp_laws.build(torch.bfloat16, "G-M-", **kind) for _ in range(2))
        )
        settings = DistributedDataParallelConfig()
        # The group of the other laws: DTensor takes meshes of the same ranks for one another, and
        # Megatron refuses gradients of two groups.
        world = dist.group.WORLD
        wrapped = TorchFullyShardedDataParallel(model.config, settings, model, process_group=world)
        assert any("fp32_group" in name for name, _ in model.named_modules())
        torch.manual_seed(50 + dist.get_rank())
        tokens = torch.randint(fsdp_laws.VOCABULARY, (2, 17))
        positions = torch.arange(16).expand(2, -1)
        expected, losses = (
            m(tokens[:, :-1], positions, None, labels=tokens[:, 1:]) for m in (one, wrapped)
        )
        assert torch.equal(losses, expected)
        for loss in (expected, losses):
            loss.sum().backward()
        for name, whole in one.named_parameters():
            dist.all_reduce(whole.grad)
            whole.grad /= dist.get_world_size()
            assert torch.equal(model.get_parameter(name).grad.full_tensor(), whole.grad), name
        adam = OptimizerConfig(
            optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16, clip_grad=0.0
        )
        for m in (one, wrapped):
            m.ddp_config = settings
            get_megatron_optimizer(adam, [m]).step()
        for name, whole in one.named_parameters():
            assert torch.equal(model.get_parameter(name).full_tensor(), whole), name
