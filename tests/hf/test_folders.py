"""Whole folders through the command line and back; every way they can be wrong is said by name."""

import hashlib
import json
import shutil
import subprocess
import sys
import weakref
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_gdn.hf import (
    ImportedFolder,
    SourceRecord,
    compare_folders,
    export_folder,
    import_folder,
    state_dict_to_hf,
)
from megatron_gdn.hf.__main__ import main
from megatron_gdn.hf.compare import open_weights
from megatron_gdn.hf.safetensors_reader import SafetensorsFolder


def digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_export_gives_the_source_files_back_byte_for_byte(any_folder, tmp_path, tp_size):
    import_folder(any_folder, tmp_path / "shards", tp_size)
    export_folder(tmp_path / "shards", tmp_path / "back")
    assert digests(tmp_path / "back") == digests(any_folder)
    assert list(compare_folders(any_folder, tmp_path / "shards")) == []


@pytest.mark.parametrize("options", [{"model": "gpt"}, {"zero_centered_gamma": False}])
@pytest.mark.parametrize("name", ["next", "moe packed", "dense tied"])
def test_other_model_kinds_round_trip_too(hf_folder, tmp_path, name, options):
    import_folder(hf_folder(name), tmp_path / "shards", 2, vocab_divisible_by=16, **options)
    export_folder(tmp_path / "shards", tmp_path / "back")
    assert digests(tmp_path / "back") == digests(hf_folder(name))


def test_a_rounded_bf16_state_still_gives_every_bit_back(any_folder, tmp_path):
    """What training code sees: all weights bf16 but the gates, then an export."""
    import_folder(any_folder, tmp_path / "shards", 2)
    imported = ImportedFolder(tmp_path / "shards")
    ranks = [
        {n: t if n.endswith(("A_log", "dt_bias")) else t.bfloat16() for n, t in state.items()}
        for state in map(imported.rank_state, range(2))
    ]
    source = open_weights(any_folder)
    exported = dict(state_dict_to_hf(ranks, SourceRecord.from_folder(any_folder)))
    for key in source:
        if key.startswith(("mtp.", "model.visual.")):
            assert key not in exported
            continue
        assert exported[key].dtype == source.read(key).dtype, key
        assert torch.equal(exported[key], source.read(key)), key


def test_shards_hold_megatron_names_and_sizes(hf_folder, tmp_path):
    import_folder(hf_folder("moe"), tmp_path / "shards", 4, vocab_divisible_by=8)
    state = ImportedFolder(tmp_path / "shards").rank_state(3)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    mixer, moe = "decoder.layers.0.self_attention.", "decoder.layers.1.mlp."
    expected = {
        "embedding.word_embeddings.weight": (24, 24),
        "output_layer.weight": (24, 24),
        f"{mixer}in_proj.weight": ((2 * 24 + 2 * 40 + 2 * 8) // 4, 24),
        f"{mixer}in_proj.layer_norm_weight": (24,),
        f"{mixer}conv1d.weight": (22, 1, 4),
        f"{mixer}A_log": (2,),
        f"{mixer}dt_bias": (2,),
        f"{mixer}out_norm.weight": (5,),
        f"{mixer}out_proj.weight": (24, 10),
        f"{moe}router.weight": (4, 24),
        f"{moe}experts.linear_fc1.weight3": (6, 24),
        f"{moe}experts.linear_fc2.weight0": (24, 3),
        f"{moe}shared_experts.linear_fc1.weight": (8, 24),
        f"{moe}shared_experts.gate_weight": (1, 24),
        "decoder.layers.1.pre_mlp_layernorm.weight": (24,),
        "decoder.layers.6.self_attention.linear_qkv.weight": ((2 * 12 + 2 * 4) * 8 // 4, 24),
        "decoder.layers.6.self_attention.q_layernorm.weight": (8,),
        "decoder.final_norm.weight": (24,),
    }
    assert expected.items() <= shapes.items()
    assert state[f"{mixer}A_log"].dtype == state[f"{mixer}dt_bias"].dtype == torch.float32
    assert state[f"{mixer}in_proj.weight"].dtype == torch.bfloat16


def test_padded_vocabulary_rows_are_zero_and_leave_no_trace(hf_folder, tmp_path):
    import_folder(hf_folder("dense"), tmp_path / "shards", 4, vocab_divisible_by=32)
    imported = ImportedFolder(tmp_path / "shards")
    rows = torch.cat(
        [imported.rank_state(rank)["embedding.word_embeddings.weight"] for rank in range(4)]
    )
    assert rows.shape[0] == 128
    assert not rows[67:].any()
    assert rows[:67].any(dim=1).all()
    assert list(compare_folders(hf_folder("dense"), tmp_path / "shards")) == []


def test_fp32_gates_on_request_also_correct_the_index(hf_folder, tmp_path):
    import_folder(hf_folder("next"), tmp_path / "shards")
    export_folder(tmp_path / "shards", tmp_path / "back", fp32_gates=True)
    before, after = open_weights(hf_folder("next")), open_weights(tmp_path / "back")
    for key in before:
        is_gate = key.endswith(("A_log", "dt_bias"))
        assert after.spec(key).dtype == ("F32" if is_gate else "BF16")
        assert torch.equal(after.read(key), before.read(key).to(after.read(key).dtype))
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    # Three GDN layers of 8 value heads: 2 gates, each grown by 2 bytes a head.
    grown = (
        index["metadata"]["total_size"]
        - json.loads((hf_folder("next") / "model.safetensors.index.json").read_text())["metadata"][
            "total_size"
        ]
    )
    assert grown == 3 * 8 * 2 * 2


@pytest.mark.parametrize("options", [[], ["--fp32-gates"]], ids=["", "fp32 gates"])
def test_the_command_line_says_which_trained_gates_it_rounds(hf_folder, tmp_path, caplog, options):
    shards, back = tmp_path / "shards", tmp_path / "back"
    import_folder(hf_folder("next"), shards)
    (layer,) = shards.glob("tp_rank_00_of_01/layer_0000.safetensors")
    tensors = load_file(layer)
    trained = tensors["decoder.layers.0.self_attention.dt_bias"].add_(2.0**-12)
    save_file(tensors, layer)
    assert main(["export", str(shards), str(back), *options]) == 0
    key = "model.layers.0.linear_attn.dt_bias"
    assert torch.equal(open_weights(back).read(key).float(), trained) == bool(options)
    said = [r.getMessage() for r in caplog.records if "rounded from" in r.getMessage()]
    assert len(said) == (not options)
    assert all(f"the source files have: {key}. " in text for text in said)


def test_transformers_loads_the_exported_folder(hf_folder, tmp_path):
    import transformers

    import_folder(hf_folder("moe packed"), tmp_path / "shards", 2)
    export_folder(tmp_path / "shards", tmp_path / "back")
    load = transformers.Qwen3_5MoeForCausalLM.from_pretrained
    ours = load(tmp_path / "back", dtype=torch.float32).state_dict()
    theirs = load(hf_folder("moe packed"), dtype=torch.float32).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


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
    """Apply ``change(tensors)`` to the file that holds layer 0's A_log, and fix the index."""
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


def drop(tensors):
    del tensors[A_LOG]


def cut(tensors):
    tensors[A_LOG] = tensors[A_LOG][:3].clone()


def add(tensors):
    tensors["model.layers.0.linear_attn.my_A_log"] = torch.ones(2)


def quantise(tensors):
    tensors[A_LOG] = tensors[A_LOG].to(torch.float8_e4m3fn)


def cast_to(dtype):
    return lambda tensors: tensors.update({A_LOG: tensors[A_LOG].to(dtype)})


def poison(value):
    return lambda tensors: tensors[A_LOG][5].fill_(value)


def truncate(folder):
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def delete(folder):
    (folder / "model-00002-of-00003.safetensors").unlink()


def lie(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][A_LOG] = next(
        name for name in set(index["weight_map"].values()) if name != index["weight_map"][A_LOG]
    )
    path.write_text(json.dumps(index))


def no_weights(folder):
    for path in folder.glob("model*"):
        path.unlink()


def untied_head(folder):
    edit_config(folder, tie_word_embeddings=True)


BROKEN = {
    "missing key": (lambda f: edit_weights(f, drop), r"missing key 'model.layers.0.*A_log'"),
    "wrong shape": (lambda f: edit_weights(f, cut), r"A_log has shape \(3,\).*\(8,\)"),
    "unknown key": (lambda f: edit_weights(f, add), r"unknown key '.*my_A_log'"),
    "fp8": (lambda f: edit_weights(f, quantise), r"A_log is quantised \(F8_E4M3"),
    "int8": (
        lambda f: edit_weights(f, cast_to(torch.int8)),
        r"0.linear_attn.A_log in .*\.safetensors has dtype int8; legal for .*A_log: bfloat16, ",
    ),
    "fp64 gate": (
        lambda f: edit_weights(f, cast_to(torch.float64)),
        r"A_log in .* has dtype float64; legal for .*A_log: bfloat16, float16, float32\.",
    ),
    "nan": (
        lambda f: edit_weights(f, poison(float("nan"))),
        r"0.linear_attn.A_log in .*\.safetensors holds 1 of 8 values that are NaN or inf",
    ),
    "inf": (lambda f: edit_weights(f, poison(float("-inf"))), r"A_log in .*NaN or inf"),
    "unknown architecture": (
        lambda f: edit_config(f, architectures=["LlamaForCausalLM"]),
        r"unknown architecture \['LlamaForCausalLM'\]; known: Qwen3NextForCausalLM, ",
    ),
    "missing field": (
        lambda f: edit_config(f, linear_num_key_heads=None),
        "no 'linear_num_key_heads'",
    ),
    "wrong layer types": (lambda f: edit_config(f, layer_types=["mamba"]), "layer_types must be 4"),
    "bias": (lambda f: edit_config(f, attention_bias=True), "attention_bias=true is not supported"),
    "not json": (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json does not exist"),
    "truncated": (truncate, r"model-00002-of-00003.safetensors is truncated or not.*bytes"),
    "missing file": (delete, r"model-00002-of-00003.safetensors is missing"),
    "wrong index": (lie, r"index.json and the files disagree.*A_log"),
    "no weights": (no_weights, "has no weights: neither"),
    "tied but different": (untied_head, "lm_head.weight differs from model.embed_tokens.weight"),
}


@pytest.mark.parametrize(("breakage", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_source_is_named_and_leaves_nothing_behind(
    copy, tmp_path, capsys, breakage, message
):
    import re

    breakage(copy)
    assert main(["import", str(copy), str(tmp_path / "shards")]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_error_half_way_leaves_nothing_behind(copy, tmp_path, monkeypatch):
    from megatron_gdn.hf import imported_folder

    layers = iter(range(3))
    write = imported_folder._write_layer

    def write_two_layers(*args):
        if next(layers) == 2:
            raise OSError("No space left on device")
        write(*args)

    monkeypatch.setattr(imported_folder, "_write_layer", write_two_layers)
    assert main(["import", str(copy), str(tmp_path / "shards")]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_target_that_exists_is_not_touched(copy, tmp_path, capsys):
    target = tmp_path / "shards"
    target.mkdir()
    (target / "precious").write_text("data")
    assert main(["import", str(copy), str(target)]) == 2
    assert "exists; remove it" in capsys.readouterr().err
    assert (target / "precious").read_text() == "data"


def test_heads_that_do_not_split_are_refused(copy, tmp_path, capsys):
    command = ["import", str(copy), str(tmp_path / "x"), "--tensor-model-parallel-size", "3"]
    assert main(command) == 2
    assert "3 cannot split 4 key heads" in capsys.readouterr().err


def test_broken_shards_are_named_on_export(copy, tmp_path, capsys):
    shards = tmp_path / "shards"
    import_folder(copy, shards, 2)
    path = shards / "tp_rank_01_of_02" / "layer_0002.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    assert main(["export", str(shards), str(tmp_path / "back")]) == 2
    assert "layer_0002.safetensors is truncated" in capsys.readouterr().err
    shutil.rmtree(path.parent)
    assert main(["export", str(shards), str(tmp_path / "back")]) == 2
    assert "tp_rank_01_of_02 is missing" in capsys.readouterr().err
    assert main(["export", str(copy), str(tmp_path / "back")]) == 2
    assert "is no imported folder" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


def test_compare_tells_equal_from_different(copy, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(copy, other)
    assert main(["compare", str(copy), str(other)]) == 0
    assert capsys.readouterr().out == "every tensor is equal\n"

    def change(tensors):
        tensors[A_LOG][2] += 0.5
        tensors["mtp.extra"] = torch.ones(1)

    edit_weights(other, change)
    assert main(["compare", str(copy), str(other)]) == 1
    output = capsys.readouterr().out
    assert f"{A_LOG}: 1 of 8 differ, by at most 0.5" in output
    assert "mtp.extra: only in" in output
    assert "2 tensors differ" in output


def test_compare_sees_permuted_rows_and_other_dtypes(copy, tmp_path):
    """An elementwise tolerance of 0.1 passes a permuted N(0, 0.02) weight; bits do not."""
    shards = tmp_path / "shards"
    import_folder(copy, shards)
    gate_rows = "model.layers.0.linear_attn.in_proj_a.weight"

    def change(tensors):
        tensors[A_LOG] = tensors[A_LOG].bfloat16()
        for key in tensors:
            if key == gate_rows:
                tensors[key] = tensors[key].flip(0).contiguous()

    edit_weights(copy, change)
    found = {difference.key: difference.what for difference in compare_folders(copy, shards)}
    assert found[A_LOG] == "BF16 [8] against F32 [8]"
    assert set(found) <= {A_LOG, gate_rows}


def test_the_command_runs_as_a_module(copy, tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "megatron_gdn.hf", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    done = run("import", copy, tmp_path / "shards", "--tensor-model-parallel-size", 2)
    assert done.returncode == 0, done.stderr
    assert run("export", tmp_path / "shards", tmp_path / "back").returncode == 0
    assert run("compare", copy, tmp_path / "back").stdout == "every tensor is equal\n"
    broken = run("import", tmp_path / "nowhere", tmp_path / "x")
    assert (broken.returncode, "Traceback" in broken.stderr) == (2, False)


@pytest.mark.parametrize("name", ["next", "moe packed"])
def test_conversion_holds_one_layer_at_a_time(hf_folder, tmp_path, monkeypatch, name):
    """Bytes of tensors read and still alive never exceed the largest layer."""
    alive, peak = 0, 0
    read = SafetensorsFolder.read

    def counted(self, key, expert=None):
        nonlocal alive, peak
        tensor = read(self, key, expert).clone()
        size = tensor.numel() * tensor.element_size()

        def freed():
            nonlocal alive
            alive -= size

        weakref.finalize(tensor, freed)
        alive += size
        peak = max(peak, alive)
        return tensor

    source = SafetensorsFolder(hf_folder(name))
    layers = Counter()
    for key in source:
        layer = key.split("layers.")[-1].split(".")[0] if "layers." in key else key
        layers[layer] += source.read(key).nbytes
    whole, largest = sum(layers.values()), max(layers.values())
    monkeypatch.setattr(SafetensorsFolder, "read", counted)
    import_folder(hf_folder(name), tmp_path / "shards", 2)
    assert 0 < peak <= largest < whole / 3
    peak = 0
    export_folder(tmp_path / "shards", tmp_path / "back")
    assert 0 < peak <= largest
