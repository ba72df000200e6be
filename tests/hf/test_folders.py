"""Whole folders through the command line and back; every way they can be wrong is said
by name."""

import errno
import hashlib
import json
import math
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from megatron_gdn.hf import (
    export_folder,
    folders,
    import_folder,
    load_hf_weights,
    megatron_model,
    read_hf_config,
    save_hf_weights,
)
from megatron_gdn.hf.__main__ import main
from megatron_gdn.hf.safetensors_files import SafetensorsFolder, progress_bar
from megatron_gdn.hf.tensor_plan import and_others, plan_tensors
from tests.hf.model_laws import OwnWrapper, save_with_plain_norms, stored_tensors
from tests.hf.tiny_models import FOLDERS
from tests.processes import python, python_without


def digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


QUICK = ("next dense layer", "moe packed")
KINDS = [
    pytest.param(name, kind, marks=[] if name in QUICK else pytest.mark.slow)
    for kind in ("hybrid", "gpt")
    for name in FOLDERS
]


@pytest.mark.each_value
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_export_gives_the_source_files_back_byte_for_byte(
    hf_folder, tmp_path, name, kind
):
    folder = hf_folder(name)
    import_folder(folder, tmp_path / "imported", kind)
    export_folder(tmp_path / "imported", tmp_path / "back", like=folder)
    assert digests(tmp_path / "back") == digests(folder)


@pytest.mark.parametrize("kind", ["hybrid", "gpt"])
def test_fused_weights_keep_their_own_dtype(copy, tmp_path, kind):
    """Sections of a projection are stored apart; the other weights are in bf16."""
    in_fp32 = {}
    for path in copy.glob("*.safetensors"):
        weights = load_file(path)
        fused = {
            k: w for k, w in weights.items() if re.search("in_proj|(up|gate)_pr", k)
        }
        in_fp32 |= {key: torch.randn(weight.shape) for key, weight in fused.items()}
        save_file({key: in_fp32.get(key, weights[key]) for key in weights}, path)
    import_folder(copy, tmp_path / "imported", kind)
    export_folder(tmp_path / "imported", tmp_path / "back", like=copy)
    back = SafetensorsFolder(tmp_path / "back")
    assert in_fp32
    for key, weight in in_fp32.items():
        assert torch.equal(back.read(key), weight), key


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param("next", marks=pytest.mark.nightly), "moe packed", "dense tied"],
)
def test_a_run_with_plain_norms_exports_to_the_source_files(
    pools, hf_folder, tmp_path, name
):
    """Its arguments, which its checkpoint holds, tell that gains are whole."""
    folder = hf_folder(name)
    saved = tmp_path / "saved"
    pools(1).run(save_with_plain_norms, folder, saved)
    gains = stored_tensors(saved)["decoder.final_norm.weight"]
    source = SafetensorsFolder(folder)
    assert torch.equal(gains, source.read("model.norm.weight").float() + 1.0)
    export_folder(saved, tmp_path / "back", like=folder)
    assert digests(tmp_path / "back") == digests(folder)


def test_a_rounded_bf16_state_still_gives_every_bit_back(any_folder):
    """What training code sees: all weights bf16 but the gates, then an export."""
    source = SafetensorsFolder(any_folder)
    dtypes = {key: spec.torch_dtype for key, spec in source.specs.items()}
    originals = {
        key: source.read(key) for key in source.specs if key.endswith("norm.weight")
    }
    for entry in plan_tensors(
        read_hf_config(any_folder), source.specs, "hybrid", True
    ).maps:
        pieces = [source.read(ref.key, ref.expert) for ref in entry.sources]
        full = entry.to_megatron(pieces)
        if entry.pad_rows:
            full = torch.cat([full, full.new_zeros(5, full.shape[1])])
        full = full if entry.fp32 else full.bfloat16()
        back = entry.to_hf_by_source(
            entry.unshard(entry.shards(full, 2)), dtypes, originals
        )
        for ref, piece in zip(entry.sources, pieces, strict=True):
            assert back[ref].dtype == piece.dtype, ref.key
            assert torch.equal(back[ref], piece), ref.key


@pytest.mark.parametrize("name", ["next dense layer", "moe packed", "kimi"])
def test_experts_alone_are_split_over_the_ranks_of_experts(hf_folder, name):
    """The tensor-parallel ranks of experts may be fewer than those of other layers."""
    folder = hf_folder(name)
    specs = SafetensorsFolder(folder).specs
    maps = plan_tensors(read_hf_config(folder), specs, "hybrid", True).maps
    experts = {entry.name for entry in maps if ".mlp.experts." in entry.name}
    assert experts
    assert {entry.name for entry in maps if entry.is_expert} == experts


def test_the_norms_of_a_model_on_another_device_meet_their_originals(hf_folder):
    folder = hf_folder("dense")
    source = SafetensorsFolder(folder)
    maps = plan_tensors(read_hf_config(folder), source.specs, "hybrid", True).maps
    shifted = [entry for entry in maps if entry.shift]
    assert shifted
    for entry in shifted:
        originals = [source.read(one.key) for one in entry.sources]
        full = entry.to_megatron(originals).bfloat16().to("meta")
        pieces = entry.to_hf(full, [piece.dtype for piece in originals], originals)
        assert {piece.device for piece in pieces} == {full.device}


def test_fp32_gates_on_request_also_correct_the_index(hf_folder, tmp_path):
    folder = hf_folder("next")
    import_folder(folder, tmp_path / "imported")
    export = [
        "export",
        tmp_path / "imported",
        tmp_path / "back",
        "--like",
        folder,
        "--fp32-gates",
    ]
    assert main([*map(str, export)]) == 0
    before = SafetensorsFolder(folder)
    after = SafetensorsFolder(tmp_path / "back")
    for key in before.specs:
        is_gate = key.endswith(("A_log", "dt_bias"))
        assert after.specs[key].dtype == ("F32" if is_gate else "BF16")
        assert torch.equal(after.read(key), before.read(key).to(after.read(key).dtype))
    sizes = [
        json.loads((at / "model.safetensors.index.json").read_text())["metadata"][
            "total_size"
        ]
        for at in (folder, tmp_path / "back")
    ]
    # Three GDN layers of 8 value heads: 2 gates, each grown by 2 bytes a head.
    assert sizes[1] - sizes[0] == 3 * 8 * 2 * 2


# Errors, by the command line


@pytest.fixture
def copy(hf_folder, tmp_path):
    folder = tmp_path / "source"
    shutil.copytree(hf_folder("dense"), folder)
    return folder


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder, change):
    """Apply ``change(tensors)`` to the file that holds layer 0's A_log, and fix the
    index."""
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    name = index["weight_map"]["model.layers.0.linear_attn.A_log"]
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name)
    kept = {key: file for key, file in index["weight_map"].items() if file != name}
    index["weight_map"] = kept | dict.fromkeys(tensors, name)
    index_path.write_text(json.dumps(index))


A_LOG = "model.layers.0.linear_attn.A_log"


def cast_to(dtype):
    return lambda tensors: tensors.update({A_LOG: tensors[A_LOG].to(dtype)})


def poison(value):
    return lambda tensors: tensors[A_LOG][5].fill_(value)


SECOND = "model-00002-of-00003.safetensors"
THIRD = "model-00003-of-00003.safetensors"


def edit_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def keep_an_old_copy(folder):
    """Of layer 0's A_log in the last file, where the index does not put it."""
    tensors = load_file(folder / THIRD)
    save_file(tensors | {A_LOG: torch.ones(8)}, folder / THIRD)


# How the tensors of a folder are changed, and the error.
TENSORS = {
    "missing key": (
        lambda tensors: tensors.pop(A_LOG),
        r"missing key 'model.layers.0.*A_log': a Qwen\w+ with 4 layers needs it",
    ),
    "missing keys": (
        lambda tensors: [tensors.pop(key) for key in sorted(tensors) if ".mlp." in key],
        r"missing key 'model.layers.0.mlp.*' \(and \d more\): a Qwen",
    ),
    "wrong shape": (
        lambda tensors: tensors.update({A_LOG: tensors[A_LOG][:3].clone()}),
        r"A_log has shape \(3,\).*\(8,\)",
    ),
    "unknown key": (
        lambda tensors: tensors.update(
            {A_LOG.replace("A_log", "my_A_log"): torch.ones(2)}
        ),
        r"unknown key '.*my_A_log'",
    ),
    "unsigned": (
        cast_to(torch.uint32),
        r"A_log in .*\.safetensors has dtype U32; known: F64, .* Convert the folder",
    ),
    "fp8": (cast_to(torch.float8_e4m3fn), r"A_log is FP8 \(F8_E4M3, no scales\)"),
    "int8": (
        cast_to(torch.int8),
        r"0.linear_attn.A_log in .*\.safetensors has dtype int8; legal for .*A_log: bfloat16, ",
    ),
    "fp64 gate": (
        cast_to(torch.float64),
        r"A_log in .* has dtype float64; legal for .*A_log: bfloat16, float16, float32\.",
    ),
    **{
        str(value): (
            poison(value),
            r"0.linear_attn.A_log in .*\.safetensors holds 1 of 8 values that are NaN ",
        )
        for value in (math.nan, math.inf, -math.inf)
    },
}
# Likewise of the config's settings.
SETTINGS = {
    "unknown architecture": (
        {"architectures": ["LlamaForCausalLM"]},
        r"unknown architecture \['LlamaForCausalLM'\]; known: Qwen3NextForCausalLM, ",
    ),
    "missing field": ({"linear_num_key_heads": None}, "no 'linear_num_key_heads'"),
    "wrong layer types": ({"layer_types": ["mamba"]}, "layer_types must be 4"),
    "bias": ({"attention_bias": True}, "attention_bias=true is not supported"),
    "tied but different": (
        {"tie_word_embeddings": True},
        "lm_head.weight differs from model.embed_tokens.weight",
    ),
}

BROKEN = {
    **{
        name: (lambda f, how=how: edit_weights(f, how), said)
        for name, (how, said) in TENSORS.items()
    },
    **{
        name: (lambda f, how=how: edit_config(f, **how), said)
        for name, (how, said) in SETTINGS.items()
    },
    "not json": (
        lambda f: (f / "config.json").write_text("{"),
        "config.json is not JSON",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json does not exist"),
    "truncated": (
        lambda f: (f / SECOND).write_bytes((f / SECOND).read_bytes()[:-7]),
        rf"{SECOND} is truncated or not .* file \({{bytes}} bytes\)",
    ),
    "missing file": (lambda f: (f / SECOND).unlink(), rf"{SECOND} is missing"),
    "wrong index": (
        lambda f: edit_index(f, lambda files: files.update({A_LOG: THIRD})),
        rf"index.json says that '{A_LOG}' is in {THIRD}, but it is stored in \S*1-of-00003",
    ),
    "old copy": (
        keep_an_old_copy,
        rf"'{A_LOG}' is in \S*1-of-\S*, but it is stored in \S*1-of-\S* and {THIRD}",
    ),
    "listed only": (
        lambda f: edit_index(f, lambda files: files.update({"mtp.fc.bias": THIRD})),
        rf"'mtp.fc.bias' is in {THIRD}, but it is stored in no file",
    ),
    "not listed": (
        lambda f: edit_index(f, lambda files: files.pop(A_LOG)),
        rf"'{A_LOG}' is in no file, but it is stored in \S*1-of-00003.safetensors. Each",
    ),
    "no weights": (
        lambda f: [path.unlink() for path in f.glob("model*")],
        "has no weights: neither",
    ),
}


@pytest.mark.parametrize(("breakage", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_source_is_named_and_leaves_nothing_behind(
    copy, tmp_path, refused, breakage, message
):
    breakage(copy)
    if (copy / SECOND).exists():
        message = message.replace("{bytes}", str((copy / SECOND).stat().st_size))
    assert re.search(message, refused("import", copy, tmp_path / "imported"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_value_of_an_expert_that_is_not_finite_is_named_with_its_number(tmp_path):
    """A tensor of all experts has one map for each, which reads this expert alone."""
    values = torch.zeros(3, 2, 2)
    values[1, 0, 0] = torch.inf
    save_file({"experts": values}, tmp_path / "model.safetensors")
    source = SafetensorsFolder(tmp_path)
    file = source.path_of("experts")
    assert not source.read_finite("experts", expert=0).any()
    for expert, said, count in ((1, r" \(expert 1\)", 4), (None, "", 12)):
        with pytest.raises(ValueError, match=f"^experts{said} in {file} .*of {count} "):
            source.read_finite("experts", expert)


def test_an_expert_that_is_not_there_is_named_with_its_file(hf_folder):
    source = SafetensorsFolder(hf_folder("dense"))
    key = "model.norm.weight"
    with pytest.raises(ValueError) as raised:
        source.read(key, expert=10_000)
    said = str(raised.value)
    assert said.startswith(f"{key} in {source.path_of(key)} cannot be read: ")
    assert "10000" in said and "\n" not in said


def test_a_fault_of_a_reader_is_no_damaged_file(hf_folder):
    source = SafetensorsFolder(hf_folder("dense"))
    source.files = dict.fromkeys(source.files)
    with pytest.raises(AttributeError):
        source.read("model.norm.weight")


@pytest.mark.parametrize(
    "model", [nn.Linear(2, 2), OwnWrapper(nn.Linear(2, 2)), [nn.Linear(2, 2)]]
)
def test_a_model_that_is_not_megatrons_is_refused(hf_folder, model):
    said = f"a {type(model).__name__} holds no HybridModel or GPTModel"
    with pytest.raises(ValueError, match=said):
        load_hf_weights(model, hf_folder("dense"))


def test_progress_is_shown_on_a_terminal_alone(monkeypatch, capsys):
    assert list(progress_bar([3, 4], "export")) == [3, 4]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert list(progress_bar([3, 4], "export")) == [3, 4]
    assert "export: 100%" in capsys.readouterr().err


def test_a_safetensors_that_fails_otherwise_is_not_called_missing(monkeypatch):
    class Broken(ModuleType):
        def __getattr__(self, name):
            raise KeyError(name)

    monkeypatch.setitem(sys.modules, "safetensors", Broken("safetensors"))
    with pytest.raises(KeyError):
        main(["flags", "folder"])


def test_an_error_half_way_leaves_nothing_behind(copy, tmp_path, refused, monkeypatch):
    read = SafetensorsFolder.read
    count = iter(range(1000))

    def read_some(*args):
        if next(count) == 20:
            raise OSError("Input/output error")
        return read(*args)

    monkeypatch.setattr(SafetensorsFolder, "read", read_some)
    refused("import", copy, tmp_path / "imported")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_target_that_exists_is_not_touched(copy, tmp_path, refused):
    folder = tmp_path / "imported"
    folder.mkdir()
    file = folder / "precious"
    file.write_text("data")
    for target in (folder, file):
        assert f"{target} exists; remove it" in refused("import", copy, target)
        assert file.read_text() == "data"


@pytest.mark.parametrize(
    "export",
    [
        lambda target, none: export_folder(none, target, like=none),
        lambda target, none: save_hf_weights(None, target, like=none),
    ],
    ids=["checkpoint", "model"],
)
def test_an_export_looks_at_its_target_before_anything_else(
    tmp_path, export, monkeypatch
):
    """Before it reads a large file, and on every rank, also on those that write none."""
    monkeypatch.setattr(megatron_model, "_parallel_size", lambda kind: 1)
    monkeypatch.setattr(megatron_model.parallel_state, "get_data_parallel_rank", _zero)
    (tmp_path / "precious").touch()
    with pytest.raises(FileExistsError, match="exists; remove it"):
        export(tmp_path, tmp_path / "none")


def _zero(**_) -> int:
    return 0


def test_a_target_that_cannot_be_made_is_named(copy, tmp_path, refused):
    (tmp_path / "file").touch()
    for target in (tmp_path / "file" / "imported", "/proc/imported"):
        said = refused("import", copy, target)
        assert str(Path(target).parent) in said
        assert said.count("\n") == 1


def test_an_error_without_words_is_told_by_its_type(
    copy, tmp_path, refused, monkeypatch
):
    def fail(*_, **__):
        raise NotImplementedError

    monkeypatch.setattr(folders, "import_folder", fail)
    said = refused("import", copy, tmp_path / "imported")
    assert said.endswith("cannot be read or written: NotImplementedError\n")


def test_a_tied_models_output_layer_may_be_stored_as_the_embedding_is(
    copy, tmp_path, refused
):
    edit_config(copy, tie_word_embeddings=True)
    source = SafetensorsFolder(copy)
    embedding = source.read("model.embed_tokens.weight")
    file = copy / source.file_of["lm_head.weight"]
    for dtype in (torch.float32, torch.bfloat16):
        save_file(load_file(file) | {"lm_head.weight": embedding.to(dtype)}, file)
        if dtype != embedding.dtype:
            said = refused("import", copy, tmp_path / "imported")
            assert "lm_head.weight differs from model.embed_tokens.weight" in said
    import_folder(copy, tmp_path / "imported")
    export_folder(tmp_path / "imported", tmp_path / "back", like=copy)
    assert digests(tmp_path / "back") == digests(copy)


def test_flags_need_no_megatron(hf_folder, tmp_path):
    """The command line imports it for the commands that build a model."""
    flags = (
        "from megatron_gdn.hf.__main__ import main\n"
        "assert main(['flags', sys.argv[1]]) == 0"
    )
    assert "--hidden-dropout 0.0 " in python_without(
        "megatron", flags, tmp_path, hf_folder("dense")
    )


def test_a_command_is_asked_for(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "required: import | export | compare | flags" in capsys.readouterr().err


def test_flags_are_not_guessed(capsys):
    with pytest.raises(SystemExit):
        main(["export", "a", "b", "--li", "c"])
    assert "required: --like" in capsys.readouterr().err


def test_a_folder_that_names_no_checkpoint_is_named_on_export(copy, tmp_path, refused):
    imported = tmp_path / "imported"
    import_folder(copy, imported)
    (imported / "latest_checkpointed_iteration.txt").write_text("")
    said = refused("export", imported, tmp_path / "back", "--like", copy)
    assert "latest_checkpointed_iteration.txt holds ''; legal are" in said
    assert not (tmp_path / "back").exists()


def test_an_imported_run_begins_at_iteration_0(copy, tmp_path):
    import_folder(copy, tmp_path / "imported")
    assert (
        folders._load_common_state(tmp_path / "imported" / "release")["iteration"] == 0
    )


@pytest.mark.parametrize(
    ("names", "end"), [(["a"], ""), (["a", "b", "c"], " (and 2 more)")]
)
def test_a_message_counts_the_names_that_it_leaves_out(names, end):
    assert and_others(names) == end


def test_an_export_like_another_model_is_refused(hf_folder, copy, tmp_path, refused):
    import_folder(copy, tmp_path / "imported")
    export = "export", tmp_path / "imported", tmp_path / "back", "--like"
    for name, message in {
        "only gdn": r"not the same model: the checkpoint has no decoder.layers.6.*",
        "dense ratio 3": r"0.self_attention.A_log has shape \(8,\) in .*asks for \(12,\)",
        "dense tied": "no place for output_layer.weight",
    }.items():
        assert re.search(message, refused(*export, hf_folder(name))), name
    said = refused("export", copy, tmp_path / "back", "--like", copy)
    assert "is no distributed checkpoint" in said
    assert not (tmp_path / "back").exists()


def test_compare_tells_equal_from_different(copy, tmp_path, capsys):
    """By bits and dtypes: a tolerance of 0.1 would pass a permuted N(0, 0.02)
    weight."""
    other = tmp_path / "other"
    shutil.copytree(copy, other)
    assert main(["compare", str(copy), str(other)]) == 0
    assert capsys.readouterr().out == "every tensor is equal\n"

    gate_rows = "model.layers.0.linear_attn.in_proj_a.weight"

    def change(tensors):
        tensors[A_LOG][2] += 2**-10
        tensors[gate_rows] = tensors[gate_rows].float()
        tensors["mtp.extra"] = torch.ones(1)

    edit_weights(other, change)
    assert main(["compare", str(copy), str(other)]) == 1
    output = capsys.readouterr().out
    assert f"{A_LOG}: 1 of 8 differ, by at most 0.000977" in output
    assert f"{gate_rows}: BF16 [8, 24] against F32 [8, 24]" in output
    assert "mtp.extra: only in" in output
    assert "3 tensors differ" in output


@pytest.mark.nightly
def test_the_command_runs_as_a_module(copy, tmp_path):
    def run(*arguments):
        return python("-m", "megatron_gdn.hf", *arguments).stdout

    run("import", copy, tmp_path / "imported")
    run("export", tmp_path / "imported", tmp_path / "back", "--like", copy)
    assert run("compare", copy, tmp_path / "back") == "every tensor is equal\n"
    assert "--hidden-dropout 0.0 " in run("flags", copy)
    broken = python(
        "-m", "megatron_gdn.hf", "import", "no_part", tmp_path / "x", ends=2
    )
    assert "Traceback" not in broken.stderr


def test_a_disk_that_is_full_during_an_import_is_named(
    copy, tmp_path, refused, monkeypatch
):
    full = OSError(errno.ENOSPC, "No space left on device")

    def save(*_, **__):
        raise CheckpointException("write", {0: (full, None)})

    monkeypatch.setattr(folders.dist_checkpointing, "save", save)
    said = refused("import", copy, tmp_path / "imported")
    assert f"{tmp_path / 'imported'} cannot be written: [Errno 28] No space" in said
    assert said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_runs_argument_of_norms_is_true_or_false():
    common = {"args": SimpleNamespace(layernorm_zero_centered_gamma="no")}
    config = SimpleNamespace(stores_gains_minus_1=True)
    with pytest.raises(ValueError, match="gamma='no'; legal are True and False"):
        folders._stores_zero_centred_gains(common, config, Path("folder"))


@pytest.mark.parametrize(
    "name", ["layernorm_zero_centered_gamma", "apply_layernorm_1p"]
)
def test_a_runs_arguments_tell_whether_norm_gains_are_whole(
    hf_folder, tmp_path, name, monkeypatch
):
    """A folder stores a gain minus 1, and a run without that setting a whole gain."""
    folder = hf_folder("only gdn")
    import_folder(folder, tmp_path / "imported")
    load = folders._load_common_state

    def load_of_such_a_run(folder):
        common = load(folder)
        for either in ("layernorm_zero_centered_gamma", "apply_layernorm_1p"):
            vars(common["args"]).pop(either, None)
        setattr(common["args"], name, False)
        return common

    monkeypatch.setattr(folders, "_load_common_state", load_of_such_a_run)
    export_folder(tmp_path / "imported", tmp_path / "back", like=folder)
    before = SafetensorsFolder(folder)
    after = SafetensorsFolder(tmp_path / "back")
    key = "model.layers.0.input_layernorm.weight"
    gain = before.read(key)
    assert torch.equal(after.read(key), (gain.float() - 1).to(gain.dtype))


@pytest.mark.parametrize("others", [0, 1, 2])
def test_a_file_that_transformers_would_load_alone_is_refused(tmp_path, others):
    names = ["model.safetensors", *(f"{n}.safetensors" for n in range(others))]
    for name in names:
        save_file({name: torch.zeros(1)}, tmp_path / name)
    index = {"weight_map": {name: name for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    if not others:
        assert list(SafetensorsFolder(tmp_path).specs) == names
        return
    with pytest.raises(ValueError, match="model.safetensors beside other files"):
        SafetensorsFolder(tmp_path)


def test_a_checkpoint_with_states_of_an_optimizer_is_of_its_model(tmp_path):
    weight = SimpleNamespace(
        dtype=torch.float32, global_shape=(2,), allow_shape_mismatch=False
    )
    stored = {"decoder.norm.weight": weight, "optimizer.state.exp_avg": weight}
    expected = {"decoder.norm.weight": weight}
    folders._refuse_another_model(stored, expected, tmp_path, tmp_path)
    with pytest.raises(ValueError, match=r"no place for decoder\.norm\.weight"):
        folders._refuse_another_model(stored, {}, tmp_path, tmp_path)
