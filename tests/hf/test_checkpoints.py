"""An import is a Megatron checkpoint: real models load it, at any size, and save what
exports."""

import argparse
import copy
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    apply_factories,
)
from megatron.core.dist_checkpointing.serialization import (
    load_content_metadata,
    load_sharded_metadata,
)

from megatron_gdn.frameworks.patch import add_flags_of_kda
from megatron_gdn.hf import (
    build_model,
    compare_folders,
    export_folder,
    import_folder,
    load_hf_weights,
    megatron_flags,
    read_hf_config,
)
from megatron_gdn.hf.folders import find_checkpoint
from tests.hf.model_laws import build_megatron, checkpoint_loads, load_and_save
from tests.parallel import parallel


@pytest.fixture(scope="module")
def imported(hf_folder, tmp_path_factory):
    """``imported(name, kind)``: the folder and its import; do not write into them."""
    made = {}

    def make(name: str, kind: str):
        if (name, kind) not in made:
            made[name, kind] = tmp_path_factory.mktemp("imported") / "checkpoint"
            import_folder(hf_folder(name), made[name, kind], model=kind)
        return hf_folder(name), made[name, kind]

    return make


def stored_by_a_model(folder, kind: str) -> tuple[dict, set]:
    """Keys and whole shapes that a model's own save would write, and its object
    keys."""
    with parallel(1):
        state = build_megatron(read_hf_config(folder), kind).sharded_state_dict()
        apply_factories(state)
    values = list(nested_values(state))
    tensors = {
        v.key: tuple(v.global_shape) for v in values if isinstance(v, ShardedTensor)
    }
    objects = {v.unique_key for v in values if isinstance(v, ShardedObject)}
    return tensors, objects


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["hybrid", "gpt"])
@pytest.mark.parametrize(
    "name", ["next dense layer", "dense tied", "moe packed", "vision"]
)
def test_an_import_has_the_keys_and_shapes_that_megatron_saves(
    pools, imported, name, kind
):
    folder, checkpoint = imported(name, kind)
    ((tensors, objects),) = pools(1).run(stored_by_a_model, folder, kind)
    stored = load_sharded_metadata(str(find_checkpoint(checkpoint)))
    found = {
        k: tuple(v.global_shape)
        for k, v in stored.items()
        if isinstance(v, ShardedTensor)
    }
    # Transformer Engine's modules ask for more of these than local ones.
    assert objects < stored.keys() - found.keys()
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if key in tensors:
            # The model pads 67 rows to 72, and loads either.
            assert (found.pop(key), tensors.pop(key)) == ((67, 24), (72, 24))
    assert found == tensors


def test_an_import_has_the_content_metadata_of_a_launch(imported):
    from megatron.training import checkpointing

    args = argparse.Namespace(use_distributed_optimizer=False)
    expected = checkpointing._build_sharded_state_dict_metadata(args, object())
    del expected["dp_cp_group"]  # a launch does not store its groups
    folder = find_checkpoint(imported("dense tied", "hybrid")[1])
    assert load_content_metadata(str(folder)) == expected


@pytest.mark.parametrize(
    ("name", "kind", "sizes"),
    [
        ("next", "hybrid", {}),
        ("next dense layer", "gpt", {}),
        ("dense tied", "hybrid", {"tp": 2}),
        ("moe packed", "gpt", {"tp": 2}),
        ("dense tied", "hybrid", {"pp": 2}),
        ("moe", "gpt", {"pp": 2, "ep": 2}),
        pytest.param("next", "gpt", {"ep": 2}, marks=pytest.mark.nightly),
        pytest.param("moe packed", "gpt", {"pp": 2}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_every_rank_loads_its_share_at_any_size(pools, imported, name, kind, sizes):
    """What `load_hf_weights` fills it with, bit for bit, and all of it over the
    ranks."""
    folder, checkpoint = imported(name, kind)
    world = sizes.get("pp", 1) * max(sizes.get("tp", 1), sizes.get("ep", 1))
    held = pools(world).run(checkpoint_loads, folder, checkpoint, kind, **sizes)
    if "pp" in sizes or "ep" in sizes:
        assert all(set(names) < set().union(*held) for names in held)


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "kind", "sizes"),
    [
        ("next", "hybrid", {"tp": 2}),
        ("dense tied", "hybrid", {"pp": 2}),
        ("moe packed", "gpt", {"ep": 2}),
    ],
    ids=str,
)
def test_a_checkpoint_that_megatron_saved_exports_to_the_bits_of_the_source(
    pools, imported, tmp_path, name, kind, sizes, dtype
):
    folder, checkpoint = imported(name, kind)
    pools(2).run(
        load_and_save,
        checkpoint,
        folder,
        tmp_path / "iter_0000001",
        kind,
        dtype,
        **sizes,
    )
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    export_folder(tmp_path, tmp_path / "back", like=folder)
    assert list(compare_folders(folder, tmp_path / "back")) == []


def megatron_loads(folder, checkpoint, kind: str) -> dict[str, tuple]:
    """Load with Megatron's own command line and loader; settings it would build
    otherwise."""
    import megatron.training.arguments as arguments
    from megatron.core import num_microbatches_calculator as micro_batches
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import checkpointing, global_vars
    from megatron.training.argument_utils import core_transformer_config_from_args

    config = read_hf_config(folder)
    add_flags_of_kda()
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
    here = [
        "--no-rope-fusion",
        "--transformer-impl=local",
        "--no-gradient-accumulation-fusion",
    ]
    launch = [
        "--load",
        str(checkpoint),
        "--seq-length=64",
        "--micro-batch-size=1",
        *here,
    ]
    args = parser.parse_args([*megatron_flags(config, kind), *launch])
    # What Megatron's start of a run works out from these.
    args.num_layers = args.num_layers or len(args.hybrid_layer_pattern)
    args.rank = 0
    args.world_size = 1
    args.data_parallel_size = 1
    args.params_dtype = torch.float32
    args.use_dist_ckpt = True
    of_another_model = copy.copy(args)
    of_another_model.rotary_interleaved = True
    of_another_model.add_qkv_bias = True
    micro_batches.destroy_num_microbatches_calculator()
    micro_batches.init_num_microbatches_calculator(0, None, 1, 1, 1)
    with (
        parallel(1),
        # Later tests of this process run outside of a launch.
        patch.object(global_vars, "_GLOBAL_ARGS", args),
        # There device="cuda" is the CPU, as in the files of Megatron-Core.
        patch.object(checkpointing, "torch", schedules.torch),
    ):
        loaded, ours = build_model(folder, kind)
        assert checkpointing.load_checkpoint([loaded], None, None)[0] == 0
        as_stored, _ = checkpointing.load_args_from_checkpoint(of_another_model)
        assert not as_stored.rotary_interleaved and not as_stored.add_qkv_bias
        filled, _ = build_model(folder, kind)
        load_hf_weights(filled, folder)
        theirs = core_transformer_config_from_args(args)
    for (name, one), other in zip(
        loaded.named_parameters(), filled.parameters(), strict=True
    ):
        assert torch.equal(one, other), name
    names = [*config.megatron_settings(kind), "hidden_dropout", "attention_dropout"]
    pairs = {name: (getattr(ours, name), getattr(theirs, name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param("moe", "hybrid", marks=pytest.mark.slow),
        ("dense tied", "hybrid"),
        ("next dense layer", "gpt"),
    ],
)
def test_megatrons_own_loader_takes_an_import_and_our_flags_build_its_model(
    pools, imported, name, kind
):
    (different,) = pools(1).run(megatron_loads, *imported(name, kind), kind)
    assert different == {}


def refusal(call, *args, **options) -> str:
    with pytest.raises((ValueError, ImportError, RuntimeError)) as caught:
        call(*args, **options)
    return str(caught.value)


def test_a_folder_is_not_converted_by_several_ranks(pools, hf_folder, tmp_path):
    for said in pools(2).run(
        refusal, import_folder, hf_folder("dense"), tmp_path / "imported"
    ):
        assert said.startswith(
            "torch.distributed runs 2 processes; convert whole folders"
        )
    assert [*tmp_path.iterdir()] == []


def building_fails(folder: Path, **options) -> str:
    with parallel(1):
        return refusal(build_model, folder, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_pattern": "G-G-G-G-"}, "layer_pattern='G-G-G-G-' is not the model's"),
        ({"spec": "mine", "layer_options": {"bias": True}}, "put them into the spec"),
    ],
    ids=["pattern", "two specs"],
)
def test_a_model_that_is_not_the_configs_is_not_built(
    pools, hf_folder, options, message
):
    (found,) = pools(1).run(building_fails, hf_folder("dense"), **options)
    assert message in found
