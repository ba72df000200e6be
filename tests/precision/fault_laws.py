"""Run on every rank: Megatron's own way with mixed dtypes, with and without our remedy."""

from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace

import torch
from megatron.core import parallel_state

from megatron_gdn.compat.mixed_dtype_optimizers import (
    repair_mixed_dtype_optimizers,
    restore_mixed_dtype_optimizers,
)
from megatron_gdn.compat.optimizer_checkpoints import pad_between_buckets, store_empty_shares
from tests.parallel import parallel
from tests.precision.training import (
    FLOAT16,
    Training,
    build,
    build_model,
    load,
    made_up_gradient,
    made_up_step,
    replicas_of,
    save,
    sharded_state,
    tensors_in,
    wrap,
)

# Eight heads, and norms of eight weights: every parameter without weight decay is of one shape, so
# that nothing but their values tells them apart.
EQUAL_SHAPES = {"hidden_size": 8, "linear_value_head_dim": 8, "add_bias_linear": False}


@contextmanager
def remedy(is_on: bool):
    """Keep the wrappers, or take them off for a while."""
    if not is_on:
        restore_mixed_dtype_optimizers()
    try:
        yield
    finally:
        repair_mixed_dtype_optimizers()


def stepped(kind: str, remedied: bool = True, ddp: dict | None = None, **options) -> Training:
    """A model that took one step. Without the remedy, Megatron alone made its optimizer."""
    model = build_model(**options)
    # Marking the layer's parameters installed the wrappers; they come off before the optimizer.
    with remedy(remedied):
        training = wrap(kind, model, **(ddp or {}))
        made_up_step(training, 1)
    return training


def outcome_of_saving(kind: str, remedied: bool) -> str | None:
    """The exception that describing the optimizer's state raises, if any."""
    with parallel(tp=2):
        training = stepped(kind, remedied, tp=2)
        with remedy(remedied):
            return raised(lambda: sharded_state(training))


def raised(call) -> str | None:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def state_stands_under_its_own_name(kind: str, remedied: bool, folder: str) -> bool:
    """Whether the saved first moment of A_log is that of A_log, where shapes cannot tell."""
    with parallel():
        training = stepped(kind, remedied, **EQUAL_SHAPES)
        gradient = made_up_gradient("decoder.layers.0.self_attention.A_log", training.A_log, 1)
        with remedy(remedied):
            save(training, folder)
        saved = tensors_in(folder)["optimizer.state.exp_avg.decoder.layers.0.self_attention.A_log"]
        return torch.equal(saved, torch.zeros(8).lerp(gradient, 1 - 0.9))


def states_that_buckets_change(remedied: bool, folder: str, **options) -> tuple[int, list[str]]:
    """How many tensors a file has, and those that differ where the buffer has several buckets.

    Adam works on every element by itself: buckets, which say in which messages gradients travel,
    change no bit of the parameters and their states.
    """
    files = []
    for size in (None, 500):
        with parallel():
            several = {"overlap_grad_reduce": True, "bucket_size": size} if size else {}
            training = stepped("fully_reshardable", ddp=several, **options)
            buffer = max(training.megatron_optimizer.buffers, key=lambda buffer: buffer.numel)
            assert (len(buffer.buckets) > 2) is (size is not None), len(buffer.buckets)
            files.append(f"{folder}/{size}")
            with remedy(remedied):
                save(training, files[-1])
    one, other = map(tensors_in, files)
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return len(one), [key for key in one if not torch.equal(one[key], other[key])]


def outcome_of_loading(kind: str, remedied: bool, folder: str) -> str | None:
    """The exception of loading one's own checkpoint into an optimizer whose order is right."""
    with parallel(tp=2):
        training = stepped(kind, tp=2)
        save(training, folder)
        with remedy(remedied):
            return raised(lambda: load(training, folder))


def replicas_after_loading_upstream(kind: str, remedied: bool, folder: str) -> list[list[float]]:
    """A_log on each data-parallel rank, after loading a checkpoint of a bf16 A_log."""
    with parallel():
        save(stepped(kind, upstream_layer=True), folder)
        training = build(kind)
        with remedy(remedied):
            load(training, folder)
        return [replica.tolist() for replica in replicas_of(training.A_log)]


def wrapping_is_reversible() -> None:
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    def methods():
        return [
            getattr(owner, name, None)
            for owner in (
                DistributedOptimizer,
                Float16OptimizerWithFloat16Params,
                TorchDistLoadShardedStrategy,
            )
            for name in (
                "__init__",
                "load",
                "load_state_dict",
                "load_parameter_state_from_dp_zero",
                "sharded_state_dict",
                "sharded_param_state_dp_reshardable",
                "sharded_param_state_fully_reshardable",
            )
        ]

    restore_mixed_dtype_optimizers()
    before = methods()
    repair_mixed_dtype_optimizers()
    during = methods()
    repair_mixed_dtype_optimizers()
    assert methods() == during
    assert sum(a is not b for a, b in zip(before, during, strict=True)) == 8
    restore_mixed_dtype_optimizers()
    assert methods() == before
    repair_mixed_dtype_optimizers()


def _cut_without_padding(self, model, metadata=None):
    """What a repaired Megatron saves: each parameter is cut where it stands without padding."""
    ((state,),) = (tensors.values() for tensors in self.get_parameter_state_dp_zero().values())
    (buffer,) = self.buffers
    cut, start = {}, 0
    for index, (first, end, _) in enumerate(buffer.param_index_map.values()):
        data = state["param"][start : start + end - first]
        cut[index] = {"param": SimpleNamespace(data=data)}
        start += end - first
    return cut


def padding_is_left_to_a_repaired_optimizer() -> None:
    saved = partial(pad_between_buckets, _cut_without_padding)
    kind, sizes = (torch.float32, torch.float32), {"a": (0, 3, 0), "b": (128, 130, 1)}
    buckets = [
        SimpleNamespace(grad_data=torch.zeros(128), numel_unpadded=n, offset=at)
        for n, at in ((3, 0), (2, 128))
    ]
    buffer = SimpleNamespace(buckets=buckets, numel=256, numel_unpadded=5, param_index_map=sizes)
    gathered = {"param": torch.arange(5.0), "numel_unpadded": 5}
    optimizer = SimpleNamespace(
        buffers=[buffer], get_parameter_state_dp_zero=lambda **_: {0: {kind: gathered}}
    )
    found = [state["param"].data.tolist() for state in saved(optimizer, {}, metadata={}).values()]
    assert found == [[0.0, 1.0, 2.0], [3.0, 4.0]], found


def _unrelated_failure(optimizer) -> None:
    raise AssertionError


def a_repaired_optimizer_is_left_alone() -> None:
    """Wrapping a class that is right already changes nothing it does."""
    from megatron_gdn.compat import mixed_dtype_optimizers as ours

    calls = []

    def repaired(self, model_sharded_state_dict, is_loading=False, metadata=None):
        calls.append([len(group) for group in self.float16_groups])
        state = list(model_sharded_state_dict.values())
        named = {
            index: {"exp_avg": type("Named", (), {"key": f"optimizer.state.exp_avg.{t.key}"})}
            for index, t in enumerate(state)
        }
        return {"optimizer": {"state": named}, "mine": True}

    with parallel():
        optimizer = build(FLOAT16).megatron_optimizer
        assert ours._forgets_fp32_parameters(repaired, torch.device("cpu")) is False
        state = ours._store_all_parameters(repaired, optimizer, {})
        assert state["mine"] and ours._MASTERS not in state
        assert calls[-1] == [len(group) for group in optimizer.float16_groups]
    with parallel():
        sharded = build("fully_reshardable").megatron_optimizer
        order = sharded.model_param_group_index_map
        ours._order_as_adam(lambda self: None, sharded)
        assert sharded.model_param_group_index_map is order
        assert store_empty_shares(lambda self: calls, sharded) is calls
        with suppress(AssertionError):
            store_empty_shares(_unrelated_failure, sharded)
            raise RuntimeError("an assertion that is none of ours was swallowed")
    assert not parallel_state.is_initialized()
