"""Checkpoints of a layer with a bf16 A_log load here, and ours load there, masters included."""

import pytest
import torch

from tests.precision import foreign_laws as laws
from tests.precision.training import FLOAT16

layouts = pytest.mark.parametrize(
    ("kind", "tp", "size"),
    [
        pytest.param(FLOAT16, 1, 2, marks=pytest.mark.slow),
        ("fully_reshardable", 1, 2),
        pytest.param("fully_reshardable", 2, 4, marks=pytest.mark.slow),
    ],
    ids=["float16-tp1-dp2", "fully_reshardable-tp1-dp2", "fully_reshardable-tp2-dp2"],
)


@pytest.fixture(scope="module")
def written(pools, tmp_path_factory):
    """``written(kind, upstream_layer)``: a folder, and the values of A_log in it."""
    made = {}

    def get(*key):
        if key not in made:
            folder = str(tmp_path_factory.mktemp("written"))
            made[key] = folder, pools(4).run(laws.write, key[0], folder, key[1])[0]
        return made[key]

    return get


@layouts
def test_an_upstream_checkpoint_gives_every_replica_its_fp32_master(
    pools, written, tmp_path, kind, tp, size
):
    folder, old = written(kind, True)
    assert old["model"].dtype == torch.bfloat16 and old["master"].dtype == torch.float32
    assert torch.equal(old["model"], old["master"].bfloat16())
    assert not torch.equal(old["model"].float(), old["master"])
    ours = pools(size).run(laws.read, kind, folder, tp, again=str(tmp_path))
    for rank in ours:
        assert torch.equal(rank["model"], old["master"])
        assert torch.equal(rank["master"], old["master"])


@layouts
def test_without_the_optimizer_it_is_the_rounded_value_or_the_master_on_request(
    pools, written, tmp_path, kind, tp, size
):
    folder, old = written(kind, True)
    first, second = str(tmp_path / "1"), str(tmp_path / "2")
    rounded = pools(size).run(laws.read, kind, folder, tp, again=first, optimizer=False)
    masters = pools(size).run(laws.read_masters, kind, folder, tp, again=second, wrapped=tp == 2)
    assert all(torch.equal(rank["model"], old["model"].float()) for rank in rounded)
    assert all(torch.equal(rank["model"], old["master"]) for rank in masters)


@layouts
def test_our_checkpoint_gives_upstream_its_fp32_master(pools, written, tmp_path, kind, tp, size):
    folder, new = written(kind, False)
    assert new["model"].dtype == torch.float32 and torch.equal(new["model"], new["master"])
    theirs = pools(size).run(laws.read, kind, folder, tp, again=str(tmp_path), upstream_layer=True)
    for rank in theirs:
        assert torch.equal(rank["model"], new["model"].bfloat16())
        assert torch.equal(rank["master"], new["model"])


def test_a_file_whose_model_is_fp32_needs_no_masters(pools, tmp_path):
    assert pools(2).run(laws.masters_read_from_our_own_file, str(tmp_path)) == [[], []]


def test_a_dp_reshardable_checkpoint_of_upstream_is_refused_and_not_misread(pools, tmp_path):
    outcomes = pools(2).run(laws.read_dp_reshardable_of_upstream, str(tmp_path))
    assert all("Global shape mismatch" in outcome for outcome in outcomes), outcomes
    way_out = "save it again with --dist-ckpt-optim-fully-reshardable"
    assert all(outcome.count(way_out) == 1 for outcome in outcomes), outcomes


FULLY = "--dist-ckpt-optim-fully-reshardable"


@pytest.mark.parametrize(
    ("as_torch_file", "flags"),
    [(False, FULLY), (True, f"--ckpt-format torch_dist --auto-detect-ckpt-format {FULLY}")],
    ids=["dp_reshardable", "torch"],
)
def test_a_save_that_megatrons_layer_cannot_load_names_the_flags(
    pools, tmp_path, as_torch_file, flags
):
    """Megatron's own process has nothing of this package that could add to its error."""
    found = pools(2).run(laws.said_when_saved, "dp_reshardable", str(tmp_path), as_torch_file)
    for said in found:
        assert len(said) == 1 and said[0].endswith(f"save it again with {flags}."), said


@pytest.mark.parametrize("kind", [FLOAT16, "fully_reshardable"])
def test_a_save_that_it_can_load_says_nothing(pools, tmp_path, kind):
    assert pools(2).run(laws.said_when_saved, kind, str(tmp_path)) == [[], []]


@pytest.mark.parametrize("upstream_first", [True, False], ids=["from upstream", "to upstream"])
def test_plain_state_dicts_carry_masters_and_averages_to_the_other_layer(pools, upstream_first):
    """What ``--ckpt-format torch`` writes of a bf16 model without the distributed optimizer."""
    assert pools(1).run(laws.switch_by_a_plain_state, upstream_first) == [[]]


def test_a_list_of_masters_of_another_model_is_refused(pools):
    """Megatron's own error is about a group, or none where its groups are as many."""
    (said,) = pools(1).run(laws.a_list_of_another_model)
    assert "the checkpoint lists" in said and "--no-load-optim" in said, said


def test_two_masters_for_one_parameter_are_refused():
    from megatron_gdn.fp32_masters import _masters_by_key

    keys = ["a.A_log", "optimizer.state.param.a.A_log", "chained_1.optimizer.state.exp_avg.b"]
    assert _masters_by_key(keys) == {"a.A_log": "optimizer.state.param.a.A_log"}
    with pytest.raises(ValueError, match="two fp32 masters of a.A_log"):
        _masters_by_key([*keys, "chained_0.optimizer.state.fp32_param.a.A_log"])
