"""Checkpoints of a layer with a bf16 A_log load here, and ours load there, masters
included."""

import io
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_gdn.compat import observe
from megatron_gdn.compat.checkpoints import (
    _rows_of_section,
    explain_bucket_size_error,
    explain_file_size_error,
    load_sections_from_whole_tensor,
    register_sections_of_upstream,
    warn_on_dp_reshardable,
)
from megatron_gdn.compat.mixed_dtype_optimizers import (
    repair_mixed_dtype_optimizers,
    restore_mixed_dtype_optimizers,
)
from megatron_gdn.compat.observe import log_once
from megatron_gdn.fp32_masters import load_fp32_masters
from tests.parallel import parallel
from tests.precision.training import (
    FLOAT16,
    build,
    load,
    load_model_only,
    made_up_step,
    metadata,
    over_tp,
    replicas_of,
    save,
    tensors_in,
)
from tests.ranks import on_ranks

layouts = pytest.mark.parametrize(
    ("kind", "tp", "size"),
    [
        pytest.param(FLOAT16, 1, 2, marks=pytest.mark.slow),
        ("fully_reshardable", 1, 2),
        pytest.param("fully_reshardable", 2, 4, marks=pytest.mark.slow),
    ],
    ids=["float16-tp1-dp2", "fully_reshardable-tp1-dp2", "fully_reshardable-tp2-dp2"],
)
A_LOG = "decoder.layers.0.self_attention.A_log"


def master_key(kind: str) -> str:
    return f"optimizer.state.{'fp32_param' if kind == FLOAT16 else 'param'}.{A_LOG}"


def write(kind: str, folder: str, upstream_layer: bool) -> dict[str, torch.Tensor]:
    """Three steps, saved at tp2; what the file holds of A_log."""
    with parallel(tp=2):
        training = build(kind, tp=2, upstream_layer=upstream_layer)
        for step in range(3):
            made_up_step(training, step)
        save(training, folder)
    held = tensors_in(folder)
    return {"model": held[A_LOG], "master": held[master_key(kind)]}


def read(
    kind: str,
    folder: str,
    tp: int,
    again: str,
    upstream_layer: bool = False,
    optimizer: bool = True,
) -> dict[str, torch.Tensor]:
    """A_log of the model and its master, whole, after a load; all replicas must
    agree."""
    with parallel(tp=tp):
        training = build(kind, tp=tp, upstream_layer=upstream_layer, seed=99)
        (load if optimizer else load_model_only)(training, folder)
        return whole(training, kind, again)


def read_masters(
    kind: str, folder: str, tp: int, again: str, wrapped: bool
) -> dict[str, torch.Tensor]:
    """The same without the optimizer, and then with `load_fp32_masters`."""
    with parallel(tp=tp):
        training = build(kind, tp=tp, seed=99)
        load_model_only(training, folder)
        before = training.A_log.detach().clone()
        model = [training.ddp] if wrapped else training.model
        names = load_fp32_masters(model, folder, metadata(kind))
        expected = [A_LOG, A_LOG.replace("A_log", "dt_bias")]
        assert names == sorted(
            expected + [name.replace(".0.", ".2.") for name in expected]
        ), names
        assert not torch.equal(training.A_log, before)
        found = whole(training, kind, again)
        # the optimizer goes on from the new values, not from the old
        made_up_step(training, 5)
        moved = over_tp(training.A_log) - found["model"]
        assert 0 < moved.abs().max() < 0.02, moved
        return found


def said_when_saved(kind: str, folder: str, as_torch_file: bool = False) -> list[str]:
    """The log lines of a save that tell how Megatron's own layer can go on."""
    said: list[str] = []
    log_once.cache_clear()
    with (
        parallel(),
        mock.patch.object(
            observe, "log_single_rank", lambda *args: said.append(args[2])
        ),
    ):
        training = build(kind)
        made_up_step(training, 0)
        if as_torch_file:
            training.optimizer.save_parameter_state(f"{folder}/optimizer.pt")
        else:
            save(training, folder)
    return [line for line in said if "Megatron's own layer" in line]


def optimizer_by_name(training) -> dict[str, torch.Tensor]:
    """Masters and Adam's averages, each under its parameter's name."""
    optimizer = training.megatron_optimizer
    found = {}
    names = {parameter: name for name, parameter in training.model.named_parameters()}
    masters = {p: p for group in optimizer.fp32_from_fp32_groups for p in group}
    for half, full in zip(
        optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True
    ):
        masters |= dict(zip(half, full, strict=True))
    for parameter, master in masters.items():
        found[f"{names[parameter]} master"] = master.detach().clone()
        for kind in ("exp_avg", "exp_avg_sq"):
            found[f"{names[parameter]} {kind}"] = optimizer.optimizer.state[master][
                kind
            ].clone()
    return found


def whole(training, kind: str, folder: str) -> dict[str, torch.Tensor]:
    replicas = replicas_of(training.A_log)
    assert all(torch.equal(replica, replicas[0]) for replica in replicas), replicas
    adam = training.megatron_optimizer.optimizer
    if not adam.state:  # not loaded: its checkpoint asks for states
        for parameter in (p for group in adam.param_groups for p in group["params"]):
            averages = {
                name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")
            }
            adam.state[parameter] = {"step": torch.zeros(()), **averages}
    save(training, folder)
    held = tensors_in(folder)
    assert torch.equal(held[A_LOG], over_tp(training.A_log))
    return {"model": held[A_LOG], "master": held[master_key(kind)]}


@pytest.fixture(scope="module")
def written(pools, tmp_path_factory):
    """``written(kind, upstream_layer)``: a folder, and the values of A_log in it."""
    made = {}

    def get(*key):
        if key not in made:
            folder = str(tmp_path_factory.mktemp("written"))
            made[key] = folder, pools(4).run(write, key[0], folder, key[1])[0]
        return made[key]

    return get


@pytest.mark.slow
@layouts
def test_an_upstream_checkpoint_gives_every_replica_its_fp32_master(
    pools, written, tmp_path, kind, tp, size
):
    folder, old = written(kind, True)
    assert old["model"].dtype == torch.bfloat16 and old["master"].dtype == torch.float32
    assert torch.equal(old["model"], old["master"].bfloat16())
    assert not torch.equal(old["model"].float(), old["master"])
    ours = pools(size).run(read, kind, folder, tp, again=str(tmp_path))
    for rank in ours:
        assert torch.equal(rank["model"], old["master"])
        assert torch.equal(rank["master"], old["master"])


@pytest.mark.parametrize("kind", [FLOAT16, "fully_reshardable"])
@on_ranks(2)
def test_an_upstream_checkpoint_gives_the_master_where_it_was_saved_too(tmp_path, kind):
    with parallel():
        theirs = build(kind, upstream_layer=True)
        made_up_step(theirs, 0)
        save(theirs, str(tmp_path))
        ours = build(kind, seed=99)
        load(ours, str(tmp_path))
        held = tensors_in(str(tmp_path))
        assert torch.equal(ours.A_log, held[master_key(kind)])
        assert not torch.equal(ours.A_log, held[A_LOG].float())


@pytest.mark.slow
@layouts
def test_without_the_optimizer_it_is_the_rounded_value_or_the_master_on_request(
    pools, written, tmp_path, kind, tp, size
):
    folder, old = written(kind, True)
    first = str(tmp_path / "1")
    second = str(tmp_path / "2")
    rounded = pools(size).run(read, kind, folder, tp, again=first, optimizer=False)
    masters = pools(size).run(
        read_masters, kind, folder, tp, again=second, wrapped=tp == 2
    )
    assert all(torch.equal(rank["model"], old["model"].float()) for rank in rounded)
    assert all(torch.equal(rank["model"], old["master"]) for rank in masters)


@pytest.mark.slow
@layouts
def test_our_checkpoint_gives_upstream_its_fp32_master(
    pools, written, tmp_path, kind, tp, size
):
    folder, new = written(kind, False)
    assert new["model"].dtype == torch.float32 and torch.equal(
        new["model"], new["master"]
    )
    theirs = pools(size).run(
        read, kind, folder, tp, again=str(tmp_path), upstream_layer=True
    )
    for rank in theirs:
        assert torch.equal(rank["model"], new["model"].bfloat16())
        assert torch.equal(rank["master"], new["model"])


@on_ranks(2, cp=1)
def test_a_file_whose_model_is_fp32_needs_no_masters(tmp_path):
    training = build("fully_reshardable")
    made_up_step(training, 0)
    save(training, str(tmp_path))
    assert (
        load_fp32_masters(training.ddp, str(tmp_path), metadata("fully_reshardable"))
        == []
    )


@on_ranks(2, cp=1)
def test_a_dp_reshardable_checkpoint_of_upstream_is_refused_and_not_misread(tmp_path):
    theirs = build("dp_reshardable", upstream_layer=True)
    made_up_step(theirs, 0)
    save(theirs, str(tmp_path))
    with pytest.raises(CheckpointException, match="Global shape mismatch") as refused:
        load(build("dp_reshardable", seed=99), str(tmp_path))
    notes = "\n".join(getattr(refused.value, "__notes__", []))
    way_out = "save it again with --dist-ckpt-optim-fully-reshardable"
    assert f"{refused.value}{notes}".count(way_out) == 1, notes


FULLY = "--dist-ckpt-optim-fully-reshardable"


@pytest.mark.parametrize(
    ("as_torch_file", "flags"),
    [
        (False, FULLY),
        (True, f"--ckpt-format torch_dist --auto-detect-ckpt-format {FULLY}"),
    ],
    ids=["dp_reshardable", "torch"],
)
@on_ranks(2)
def test_a_save_that_megatrons_layer_cannot_load_names_the_flags(
    tmp_path, as_torch_file, flags
):
    """Megatron's own process has nothing of this package that could add to its
    error."""
    (said,) = said_when_saved("dp_reshardable", str(tmp_path), as_torch_file)
    assert said.endswith(f"save it again with {flags}."), said


@pytest.mark.parametrize("kind", [FLOAT16, "fully_reshardable"])
@on_ranks(2)
def test_a_save_that_it_can_load_says_nothing(tmp_path, kind):
    assert not said_when_saved(kind, str(tmp_path))


@pytest.mark.parametrize("is_loading", [False, True])
def test_a_load_warns_of_no_format(monkeypatch, is_loading):
    """Only who saves can choose another."""
    said = []
    log_once.cache_clear()
    monkeypatch.setattr(observe, "log_single_rank", lambda *args: said.append(args))
    buffers = [SimpleNamespace(param_dtype=torch.float32)]
    optimizer = SimpleNamespace(buffers=buffers)
    warn_on_dp_reshardable(lambda *_: {}, optimizer, {}, is_loading)
    assert len(said) == (not is_loading)


@pytest.mark.parametrize(
    ("explain", "error", "way_out"),
    [
        (
            explain_file_size_error,
            "Number of unpadded elements must be same in current run (96) and "
            "checkpoint (64)",
            f"--auto-detect-ckpt-format {FULLY};",
        ),
        (
            explain_bucket_size_error,
            "Global shape mismatch for loaded (8) and expected (9) tensor for key "
            "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0",
            f"save it again with {FULLY} ",
        ),
    ],
)
def test_an_error_about_sizes_tells_the_way_out(explain, error, way_out):
    def load(text):
        raise ValueError(text)

    for text, tells in ((error, True), ("no space left on device", False)):
        with pytest.raises(ValueError, match=re.escape(text)) as raised:
            explain(load, text)
        notes = getattr(raised.value, "__notes__", [])
        assert [way_out in note for note in notes] == [True] * tells


@pytest.mark.parametrize("device", ["cpu", "meta", None])
def test_sections_of_upstreams_tensor_come_where_the_layer_has_its_own(
    tmp_path, device
):
    """``device`` None: a section without data, as in a state dict of places alone. A
    section has every bit of the file's dtype."""
    whole = torch.arange(12.0, dtype=torch.float64).view(6, 2) / 7
    dcp.save({"whole": whole}, checkpoint_id=tmp_path, no_dist=True)

    def build(key):
        parts = {"first": whole[:4], "last": whole[4:]}
        return [
            ShardedTensor.from_rank_offsets(f"{key}.{name}", part.to(device or "cpu"))
            for name, part in parts.items()
        ]

    sections = register_sections_of_upstream(build)("whole")
    if device is None:
        sections = [section.without_data() for section in sections]
    asked = {section.key: section for section in sections}
    loaded = load_sections_from_whole_tensor(
        lambda strategy, others, folder: others, None, asked, tmp_path
    )
    assert {x.device.type for x in loaded.values()} == {device or "cpu"}
    if device != "meta":
        assert torch.equal(torch.cat(list(loaded.values())), whole)


@pytest.mark.parametrize(
    "rows, shards",
    [(15, [3] * 5), (12, [3, 9]), (12, [4] * 3), (12, [5] * 2)],
    ids=[
        "another size",
        "unequal shards",
        "more shards than divide a section",
        "shards that lack rows",
    ],
)
def test_rows_of_upstreams_tensor_that_are_not_the_sections_are_refused(rows, shards):
    """Sections of 8 and 4 rows; each of upstream's shards has its part of both."""
    parts = {"first": torch.zeros(8, 2), "last": torch.zeros(4, 2)}

    def build(key):
        return [
            ShardedTensor.from_rank_offsets(f"{key}.{name}", part)
            for name, part in parts.items()
        ]

    section = register_sections_of_upstream(build)("whole")[0]
    chunks = [SimpleNamespace(sizes=(n, 2)) for n in shards]
    with pytest.raises(ValueError, match="Build the layer with the checkpoint's sizes"):
        _rows_of_section(section, torch.zeros(rows, 2), SimpleNamespace(chunks=chunks))


@pytest.mark.parametrize(
    "upstream_first", [True, False], ids=["from upstream", "to upstream"]
)
@on_ranks(1)
def test_plain_state_dicts_carry_masters_and_averages_to_the_other_layer(
    upstream_first,
):
    """What ``--ckpt-format torch`` writes of a bf16 model without the distributed
    optimizer."""
    with parallel():
        first = build(FLOAT16, upstream_layer=upstream_first)
        for step in range(3):
            made_up_step(first, step)
        expected = optimizer_by_name(first)
        file = io.BytesIO()
        model = first.model.state_dict()
        torch.save({"model": model, "optimizer": first.optimizer.state_dict()}, file)
        second = build(FLOAT16, upstream_layer=not upstream_first, seed=99)
        if not upstream_first:
            restore_mixed_dtype_optimizers()
        try:
            state = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
            second.model.load_state_dict(state["model"])
            second.optimizer.load_state_dict(state["optimizer"])
        finally:
            repair_mixed_dtype_optimizers()
        found = optimizer_by_name(second)
    assert found.keys() == expected.keys()
    different = [
        n for n, tensor in found.items() if not torch.equal(tensor, expected[n])
    ]
    assert not different


@on_ranks(cp=1)
def test_a_list_of_masters_of_another_model_is_refused():
    """Megatron's own error is about a group, or none where its groups are as many."""
    state = build(FLOAT16, pattern="G-").optimizer.state_dict()
    with pytest.raises(ValueError, match="(?s)the checkpoint lists.*--no-load-optim"):
        build(FLOAT16).megatron_optimizer.load_state_dict(state)


def test_two_masters_for_one_parameter_are_refused():
    from megatron_gdn.fp32_masters import _masters_by_key

    keys = [
        "a.A_log",
        "optimizer.state.param.a.A_log",
        "chained_1.optimizer.state.exp_avg.b",
    ]
    assert _masters_by_key(keys) == {"a.A_log": "optimizer.state.param.a.A_log"}
    with pytest.raises(ValueError, match="two fp32 masters of a.A_log"):
        _masters_by_key([*keys, "chained_0.optimizer.state.fp32_param.a.A_log"])
