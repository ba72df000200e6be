"""Each fault of megatron-core 0.19, without our remedy and with it.

A test that fails with the remedy *off* says that Megatron has repaired the fault: the
part of ``megatron_gdn.compat.mixed_dtype_optimizers`` that it names can go.
"""

from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import megatron.core
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from megatron_gdn.compat import checkpoints
from megatron_gdn.compat.checkpoints import (
    make_states_to_load,
    slice_without_padding,
    store_empty_shares,
)
from megatron_gdn.compat.mixed_dtype_optimizers import (
    repair_mixed_dtype_optimizers,
    restore_mixed_dtype_optimizers,
)
from tests.distributed.layer_laws import require_same_bits
from tests.parallel import parallel
from tests.precision.half_optimizer import half_optimizer
from tests.precision.training import (
    DISTRIBUTED,
    FLOAT16,
    KINDS,
    Training,
    build,
    build_model,
    load,
    made_up_gradient,
    made_up_step,
    raised,
    replicas_of,
    save,
    sharded_state,
    shares,
    tensors_in,
    wrap,
)
from tests.ranks import on_ranks

remedies = pytest.mark.parametrize(
    "remedied",
    [
        pytest.param(False, id="megatron alone", marks=pytest.mark.slow),
        pytest.param(True, id="remedied"),
    ],
)
WITHOUT = {
    FLOAT16: "AssertionError: Optimizer shape",
    "fully_reshardable": "RuntimeError: The size of tensor a",
    "dp_reshardable": "AssertionError: (torch.Size",
}
# Eight heads, and norms of eight weights: every parameter without weight decay is of
# one shape, so that nothing but their values tells them apart.
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


def stepped(
    kind: str, remedied: bool = True, ddp: dict | None = None, **options
) -> Training:
    """A model that took one step. Without the remedy, Megatron alone made its
    optimizer."""
    model = build_model(**options)
    # Marking the layer's parameters installed the wrappers; they come off before the
    # optimizer.
    with remedy(remedied):
        training = wrap(kind, model, **(ddp or {}))
        made_up_step(training, 1)
    return training


def _cut_without_padding(self, model, metadata=None):
    """What a repaired Megatron saves: each parameter is cut where it stands without
    padding."""
    ((state,),) = (
        tensors.values() for tensors in self.get_parameter_state_dp_zero().values()
    )
    (buffer,) = self.buffers
    cut = {}
    start = 0
    for index, (first, end, _) in enumerate(buffer.param_index_map.values()):
        data = state["param"][start : start + end - first]
        cut[index] = {"param": SimpleNamespace(data=data)}
        start += end - first
    return cut


def _cut_by_the_map(self, model, metadata=None):
    """What megatron-core 0.19 saves: each parameter is cut where the buffer's map has
    it."""
    ((state,),) = (
        tensors.values() for tensors in self.get_parameter_state_dp_zero().values()
    )
    (buffer,) = self.buffers
    return {
        index: {"param": SimpleNamespace(data=state["param"][first:end])}
        for index, (first, end, _) in enumerate(buffer.param_index_map.values())
    }


def _unrelated_failure(optimizer) -> None:
    raise AssertionError


@remedies
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(tp=2)
def test_saving_a_bf16_model_with_fp32_parameters(kind, remedied):
    training = stepped(kind, remedied, tp=2)
    said = []

    def log(line, *_) -> None:
        said.append(line)

    with remedy(remedied), patch.object(checkpoints, "log_once", log):
        outcome = raised(lambda: sharded_state(training))
    if remedied:
        assert outcome is None, outcome
        told = any("fp32 parameters were added" in line for line in said)
        assert told is (kind == FLOAT16)
    else:
        assert str(outcome).startswith(WITHOUT[kind]), outcome


@on_ranks(cp=1)
def test_a_model_of_one_dtype_is_saved_as_megatron_saves_it():
    training = stepped(FLOAT16, pattern="--")
    said = []
    states = []
    for remedied in (True, False):
        with remedy(remedied), patch.object(checkpoints, "log_once", said.append):
            states.append(sharded_state(training)["optimizer"])
    ours, theirs = states
    assert ours.keys() == theirs.keys() and not said


@pytest.mark.parametrize("key", ["fp32_from_fp16_params", "fp32_from_fp16"])
@on_ranks(cp=1)
def test_a_plain_state_dict_of_megatron_alone_loads(key):
    """It lists the masters of 16-bit parameters; in old files under another name."""
    first = stepped(FLOAT16)
    with remedy(False):
        state = first.megatron_optimizer.state_dict()
    masters = state[key] = state.pop("fp32_from_fp16_params")
    second = build(FLOAT16, seed=99).megatron_optimizer
    second.load_state_dict(state)
    for found, wanted in zip(second.fp32_from_float16_groups, masters, strict=True):
        assert all(map(torch.equal, found, wanted))


@remedies
@on_ranks(2, cp=1)
def test_equal_shapes_would_be_exchanged_in_silence(tmp_path, remedied):
    """The saved first moment of A_log is that of A_log, where shapes cannot tell."""
    name = "decoder.layers.0.self_attention.A_log"
    training = stepped("fully_reshardable", remedied, **EQUAL_SHAPES)
    gradient = made_up_gradient(name, training.A_log, 1)
    with remedy(remedied):
        save(training, str(tmp_path))
    saved = tensors_in(str(tmp_path))[f"optimizer.state.exp_avg.{name}"]
    assert torch.equal(saved, torch.zeros(8).lerp(gradient, 1 - 0.9)) is remedied


MODELS = {
    "our layers": {},
    "upstream's": {"upstream_layer": True},
    "no layer of ours": {"pattern": "--"},
}


@pytest.mark.slow
@pytest.mark.each_value
@remedies
@pytest.mark.parametrize("model", MODELS)
@on_ranks(2)
def test_several_buckets_save_the_states_that_one_bucket_saves(
    tmp_path, model, remedied
):
    """Megatron alone saves wrong ones in silence: buckets may change no bit of Adam's
    states."""
    files = []
    for size in (None, 500):
        with parallel():
            several = {"overlap_grad_reduce": True, "bucket_size": size} if size else {}
            training = stepped("fully_reshardable", ddp=several, **MODELS[model])
            buffer = max(
                training.megatron_optimizer.buffers, key=lambda buffer: buffer.numel
            )
            assert (len(buffer.buckets) > 2) is (size is not None), len(buffer.buckets)
            files.append(f"{tmp_path}/{size}")
            with remedy(remedied):
                save(training, files[-1])
    one, other = map(tensors_in, files)
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    different = [key for key in one if not torch.equal(one[key], other[key])]
    assert len(one) > 10
    assert (not different) is remedied, different


@pytest.mark.each_value
@remedies
@pytest.mark.parametrize("kind", DISTRIBUTED)
@on_ranks(tp=2)
def test_loading_writes_into_fp32_parameters(tmp_path, kind, remedied):
    """One's own checkpoint, into an optimizer whose order is right."""
    training = stepped(kind, tp=2)
    save(training, str(tmp_path))
    with remedy(remedied):
        outcome = raised(lambda: load(training, str(tmp_path)))
    if kind == "dp_reshardable" and not remedied:
        assert str(outcome).startswith("RuntimeError: a view of a leaf Variable"), (
            outcome
        )
    else:
        assert outcome is None, outcome


@remedies
@on_ranks(2, cp=1)
def test_the_torch_format_resumes_with_fp32_parameters(tmp_path, remedied):
    """``--ckpt-format torch``: the resumed run is the uninterrupted one, bit for
    bit."""
    rank_file = f"{tmp_path}/{dist.get_rank()}.pt"
    states_file = f"{tmp_path}/states.pt"
    training = stepped("fully_reshardable")
    torch.save(
        (training.model.state_dict(), training.optimizer.state_dict()), rank_file
    )
    training.optimizer.save_parameter_state(states_file)
    now = shares(training)
    made_up_step(training, 2)
    later = shares(training)
    training = build("fully_reshardable", seed=99)
    model, optimizer = torch.load(rank_file, weights_only=False)
    training.model.load_state_dict(model)
    training.optimizer.load_state_dict(optimizer)
    with remedy(remedied):
        error = raised(lambda: training.optimizer.load_parameter_state(states_file))
    if not remedied:
        assert str(error).startswith("RuntimeError: a view of a leaf Variable"), error
        return
    assert error is None, error
    require_same_bits(shares(training), now)
    made_up_step(training, 2)
    require_same_bits(shares(training), later)


@remedies
@on_ranks(2, cp=1)
def test_replicas_of_a_parameter_loaded_from_bf16_are_equal(tmp_path, remedied):
    save(stepped("fully_reshardable", upstream_layer=True), str(tmp_path))
    training = build("fully_reshardable")
    with remedy(remedied):
        load(training, str(tmp_path))
    one, other = replicas_of(training.A_log)
    assert torch.equal(one, other) is remedied


@on_ranks(2)
def test_wrapping_is_reversible():
    float16 = Float16OptimizerWithFloat16Params
    owners = (DistributedOptimizer, float16, TorchDistLoadShardedStrategy)
    names = """__init__ load load_state_dict load_parameter_state_from_dp_zero sharded_state_dict
        sharded_param_state_dp_reshardable sharded_param_state_fully_reshardable"""

    def methods():
        return [
            getattr(owner, name, None) for owner in owners for name in names.split()
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
    # what a later version has repaired is left as it is
    with patch.object(megatron.core, "__version__", "0.20.0"):
        repair_mixed_dtype_optimizers()
    assert sum(a is not b for a, b in zip(before, methods(), strict=True)) == 7
    restore_mixed_dtype_optimizers()
    repair_mixed_dtype_optimizers()


@on_ranks(2)
def test_a_repair_is_told():
    """Megatron's optimizer numbers parameters otherwise than Adam; then nothing more is
    to be told."""
    from megatron_gdn.compat import mixed_dtype_optimizers as ours

    said = []
    with parallel(), patch.object(ours, "log_repair", said.append):
        sharded = build("fully_reshardable").megatron_optimizer
        said.clear()
        wrong = dict.fromkeys(sharded.model_param_group_index_map, (0, 0))
        sharded.model_param_group_index_map = wrong
        for _ in range(2):
            ours._order_as_adam(lambda self: None, sharded)
    (line,) = said
    assert "places of fp32 and 16-bit parameters were corrected" in line


@on_ranks(2)
def test_a_repaired_optimizer_is_left_alone():
    """Wrapping a class that is right already changes nothing it does."""
    from megatron_gdn.compat import mixed_dtype_optimizers as ours

    calls = []
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


@pytest.mark.parametrize("is_loading", [False, True])
def test_only_a_load_gets_copies_of_fp32_parameters(is_loading):
    """A save would hold them twice. What is loaded into the model must not change the
    optimizer's entry."""
    from megatron_gdn.compat.mixed_dtype_optimizers import _store_all_parameters

    optimizer = half_optimizer()
    fp32, master = optimizer.optimizer.param_groups[0]["params"]

    def sharded(optimizer, *_):
        groups = optimizer.fp32_from_float16_groups
        entries = [
            [ShardedTensor.from_rank_offsets("key", x.data) for x in group]
            for group in groups
        ]
        return {"fp32_from_fp16_params": entries}

    state = _store_all_parameters(sharded, optimizer, {}, is_loading)
    entries = {
        "fp32": state["fp32_params"][0],
        "half": state["fp32_from_fp16_params"][0][0],
    }
    assert entries["half"].data.data_ptr() == master.data_ptr()
    is_copy = entries["fp32"].data.data_ptr() != fp32.data_ptr()
    assert is_copy == is_loading and torch.equal(entries["fp32"].data, fp32)


@pytest.mark.parametrize("cut", [_cut_without_padding, _cut_by_the_map])
def test_an_optimizer_gets_states_without_padding(cut, monkeypatch):
    """Also one that Megatron has repaired."""
    said = []
    monkeypatch.setattr(checkpoints, "log_once", said.append)
    saved = partial(slice_without_padding, cut)
    kind = (torch.float32, torch.float32)
    sizes = {"a": (0, 3, 0), "b": (3, 5, 1), "c": (131, 132, 2)}
    buckets = [  # the first one needs no padding
        SimpleNamespace(grad_data=torch.zeros(size), numel_unpadded=n, offset=at)
        for size, n, at in ((3, 3, 0), (128, 2, 3), (128, 1, 131))
    ]
    buffer = SimpleNamespace(
        buckets=buckets, numel=259, numel_unpadded=6, param_index_map=sizes
    )
    gathered = {"param": torch.arange(6.0), "numel_unpadded": 6}
    optimizer = SimpleNamespace(
        buffers=[buffer], get_parameter_state_dp_zero=lambda **_: {0: {kind: gathered}}
    )
    found = [
        state["param"].data.tolist()
        for state in saved(optimizer, {}, metadata={}).values()
    ]
    assert found == [[0.0, 1.0, 2.0], [3.0, 4.0], [5.0]], found
    assert "in a buffer of several buckets were corrected" in "".join(said)


@pytest.mark.parametrize(
    ("error", "held"),
    [(AssertionError, {"weight": 0}), (OSError, {})],
    ids=["another assertion", "another error"],
)
def test_another_error_of_a_save_is_raised_at_once(error, held):
    """A second call would meet ranks that wait in the first one's collectives."""
    calls = []
    optimizer = SimpleNamespace(gbuf_ranges=[{"bf16": [{"param_map": held}]}])

    def save(optimizer):
        calls.append(optimizer)
        raise error("ranks disagree")

    with pytest.raises(error, match="ranks disagree"):
        store_empty_shares(save, optimizer)
    assert len(calls) == 1


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_a_share_without_parameters_is_saved_as_padding(monkeypatch, moments):
    """The second rank's share of eight elements, of which two are padding; in the
    dtypes of a share beside it."""
    said = []
    monkeypatch.setattr(checkpoints, "log_once", said.append)
    bucket = SimpleNamespace(grad_data=torch.zeros(8), numel_unpadded=6)
    moment = torch.ones(4, dtype=moments)
    held = {"param": torch.ones(4), "exp_avg": moment, "step": torch.ones(())}
    shares = [[]] if moments == torch.float32 else [[], [held]]
    optimizer = SimpleNamespace(
        gbuf_ranges=[{"bf16": [{"param_map": {}}]}],
        buffers=[SimpleNamespace(buckets=[bucket] * len(shares))],
        data_parallel_group=SimpleNamespace(size=lambda: 2, rank=lambda: 1),
        optimizer_state_keys=["exp_avg"],
        get_parameter_state_dp_reshardable=lambda: [{"bf16": shares}],
    )

    def save(optimizer):
        state = optimizer.get_parameter_state_dp_reshardable()
        assert state[0]["bf16"][0], "empty bucket encountered"
        return state

    (entry,), *others = store_empty_shares(save, optimizer)[0]["bf16"]
    assert others in ([], [[held]])
    assert entry["exp_avg"].dtype == moments
    for name in ("param", "exp_avg"):
        assert entry.pop(name).tolist() == [0, 0]
    assert entry == {"gbuf_local_start": 0, "gbuf_local_end": 2, "padding": True}
    assert "holds no parameter was added" in "".join(said)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
@on_ranks(cp=1)
def test_a_save_makes_no_states_and_a_load_makes_them(name):
    """torch's Adam has a step for each parameter, too."""
    chained = build(FLOAT16).optimizer
    (member,) = chained.chained_optimizers
    groups = member.optimizer.param_groups
    member.optimizer = getattr(torch.optim, name)(groups, lr=0.1)
    chained.chained_optimizers.append(SimpleNamespace(is_stub_optimizer=True))
    assert make_states_to_load(id, chained) == id(chained)
    assert not member.optimizer.state
    assert make_states_to_load(id, chained, is_loading=True) == id(chained)
    states = {"exp_avg", "exp_avg_sq", *(["step"] if name != "SGD" else [])}
    for parameter in (p for group in groups for p in group["params"]):
        state = member.optimizer.state[parameter]
        assert state.keys() == states and not any(x.any() for x in state.values())


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_leaves_the_optimizer_as_it_was(fails):
    """The states that it gathers later, in another format, are of its own buffers
    again."""
    buckets = [
        SimpleNamespace(grad_data=torch.zeros(128), numel_unpadded=n, offset=at)
        for n, at in ((3, 0), (2, 128))
    ]
    buffer = SimpleNamespace(
        buckets=buckets, numel_unpadded=5, param_index_map={"a": (0, 3, 0)}
    )

    class Optimizer:
        buffers = [buffer]

        def get_parameter_state_dp_zero(self, **_):
            return self.buffers

    def shard_state(optimizer, **_):
        assert optimizer.get_parameter_state_dp_zero() == [buffer]
        (cut,) = optimizer.buffers
        assert cut is not buffer, "cut without padding"
        for bucket in cut.buckets:  # as a repaired Megatron may read them
            assert bucket.grad_data.numel() == bucket.numel_unpadded
        assert [bucket.numel_unpadded for bucket in cut.buckets] == [3, 2]
        if fails:
            raise OSError("no space left on device")

    optimizer = Optimizer()
    with pytest.raises(OSError) if fails else nullcontext():
        slice_without_padding(shard_state, optimizer)
    assert "get_parameter_state_dp_zero" not in vars(optimizer)
    assert (
        optimizer.get_parameter_state_dp_zero()[0] is buffer
        and optimizer.buffers[0] is buffer
    )
