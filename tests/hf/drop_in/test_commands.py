"""The drop-in's commands, and transformers' own forward where fla is installed."""

import json
import math
import os
import re
from unittest.mock import patch

import pytest
import torch

from tests.hf.drop_in.conftest import FAMILIES, mixer_of
from tests.hf.tiny_models import build
from tests.processes import python, torchrun

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the CPU")


@on_cpu
@pytest.mark.parametrize(
    ("ranks", "replicas"),
    [
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(4, 2, marks=pytest.mark.nightly),
    ],
)
def test_losses_gradients_and_evaluation_are_those_of_a_plain_loop(
    pools, ranks, replicas
):
    pytest.importorskip("accelerate")
    pools(ranks).run(compare_with_a_plain_loop, replicas)


def compare_with_a_plain_loop(replicas: int) -> None:
    """On a rank of a pool, with the variable of torchrun that accelerate asks for."""
    from tests.hf.drop_in import trainer_laws

    with patch.dict(os.environ, LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"]):
        trainer_laws.compare_with_a_plain_loop(replicas)


@on_cpu
@pytest.mark.nightly
def test_the_example_trains_and_saves_what_transformers_loads(tmp_path):
    pytest.importorskip("accelerate")
    flags = "--steps", "11", "--save", tmp_path
    said = torchrun(2, "examples/finetune_with_trainer.py", *flags, timeout=400)
    first, last = (float(x) for x in re.findall(r"loss (\d+\.\d+)", said))
    assert first == pytest.approx(math.log(256), abs=0.2) and last < first - 1
    loaded = type(build("Qwen3_5ForCausalLM")).from_pretrained(tmp_path)
    assert loaded.model.layers[0].linear_attn.A_log.dtype == torch.float32


@pytest.mark.nightly
@on_cpu
def test_the_benchmark_runs_tiny_on_the_cpu(tmp_path):
    out = tmp_path / "results.jsonl"
    python("benchmarks/run.py", "hf", "--tiny", "--out", out)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == 6
    patched = [record for record in records if record["layer"] != "transformers"]
    assert len(patched) == 4
    for record in patched:
        assert record["forward_backward"]["median"] > 0
        # fp32 beside float64: the layer that was timed computes what it should.
        assert record["furthest"] < 1e-5, record


@pytest.mark.nightly
def test_the_picture_shows_the_leak_and_that_a_patched_model_has_none(tmp_path):
    image = tmp_path / "leaks.png"
    done = python("examples/show_leaks.py", image, TORCHDYNAMO_DISABLE="1")
    assert done.stderr == ""
    found = dict(
        re.findall(r"(\w+): a document changes another by up to (\S+)", done.stdout)
    )
    assert float(found["transformers"]) > 1e-2 and float(found["patched"]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")


TOKENS = [[3, 17, 5, 60, 2, 8, 8, 41, 9]]
NEW = 4
# Which modules hold a family's functions.
SOURCES = [
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "olmo_hybrid",
    "qwen4_exp",
    "kimi_linear",
    "bailing_hybrid",
]

IN_A_FRESH_PROCESS = """
import importlib, sys
import torch
for name in {sources}:  # fla is not hidden, so transformers takes its kernels
    importlib.import_module(f"transformers.models.{{name}}.modeling_{{name}}")
from megatron_gdn.hf import patch, plain_functions_on_cpu
from tests import bits_by_shape
from tests.hf.drop_in.conftest import mixer_of
from tests.hf.tiny_models import build

bits_by_shape.hold_if_asked()  # as in the process that compares
tokens, found = torch.tensor({tokens}), {{}}
for family in {families}:
    model = build(family)
    try:
        model(tokens)
        found[family, "as it is"] = "runs"
    except Exception as error:
        found[family, "as it is"] = str(error)
    source = vars(sys.modules[type(mixer_of(model)).__module__])
    chosen = dict(source)
    for change in (plain_functions_on_cpu, patch):  # each alone makes it run
        source.update(chosen)
        model = build(family)
        change(model)
        logits = model(tokens).logits
        logits.sum().backward()
        gradient = mixer_of(model).conv1d.weight.grad
        generated = model.generate(tokens, max_new_tokens={new}, do_sample=False)
        found[family, change.__name__] = logits.detach(), gradient, generated
torch.save(found, sys.argv[1])
"""


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run here")
def test_unpacked_batches_and_generation_run_where_fla_is_installed(fresh, tmp_path):
    """With the bits that transformers has where fla is not installed."""
    pytest.importorskip("fla")
    script = IN_A_FRESH_PROCESS.format(
        sources=SOURCES, tokens=TOKENS, families=FAMILIES, new=NEW
    )
    python("-c", script, tmp_path / "found.pt")
    found = torch.load(tmp_path / "found.pt")
    for family in FAMILIES:
        assert "0 active drivers" in found[family, "as it is"], "this law tests nothing"
        model = fresh(family)
        tokens = torch.tensor(TOKENS)
        logits = model(tokens).logits
        logits.sum().backward()
        gradient = mixer_of(model).conv1d.weight.grad
        generated = model.generate(tokens, max_new_tokens=NEW, do_sample=False)
        for change in ("plain_functions_on_cpu", "patch"):
            for ours, theirs in zip(
                found[family, change], (logits, gradient, generated), strict=True
            ):
                assert torch.equal(ours, theirs), (family, change)
