"""Imported models generate the tokens that transformers generates, each with its own
cache."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_gdn.hf import layer_from_hf, load_hf_weights, read_hf_config
from megatron_gdn.inference.generate import generate
from megatron_gdn.specs import hybrid_stack_spec
from tests.hf.model_laws import build_megatron, hf_model
from tests.hf.tiny_models import cache_name
from tests.parallel import make_config, parallel
from tests.processes import ROOT, python


def continuations(folder: Path, kind: str, count: int = 20) -> tuple[list, list, float]:
    """Greedy tokens of both, and by how much theirs are the likeliest, at the
    closest."""
    config = read_hf_config(folder)
    torch.manual_seed(5)
    prompt = torch.randint(config.vocab_size, (2, 9))
    theirs_model = hf_model(folder)
    name = cache_name(theirs_model)
    with torch.no_grad():
        theirs = prompt
        out = theirs_model(prompt, use_cache=True)
        for _ in range(count):
            token = out.logits[:, -1:].argmax(-1)
            theirs = torch.cat([theirs, token], dim=1)
            out = theirs_model(token, **{name: out[name]}, use_cache=True)
        best = theirs_model(theirs, use_cache=False).logits[:, 8:-1].topk(2).values
    with parallel():
        model = build_megatron(config, kind)
        load_hf_weights(model, folder)
        ours = generate(
            model,
            prompt,
            count,
            pick=lambda logits: logits[:, : config.vocab_size].argmax(-1),
        )
    return ours.tolist(), theirs.tolist(), (best[..., 0] - best[..., 1]).min().item()


def mamba2_continuations(count: int = 20) -> tuple[list, list, float]:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    torch.manual_seed(4)
    theirs_config = Mamba2Config(
        num_heads=8,
        head_dim=8,
        hidden_size=32,
        expand=2,
        state_size=6,
        n_groups=1,
        num_hidden_layers=3,
        vocab_size=48,
        layer_norm_epsilon=1e-5,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=None,
    )
    theirs_model = Mamba2ForCausalLM(theirs_config).eval()
    with torch.no_grad():
        # away from where it starts, and tells little
        for parameter in theirs_model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    prompt = torch.randint(1, 48, (2, 9))
    theirs = theirs_model.generate(prompt, max_new_tokens=count, do_sample=False)
    with torch.no_grad():
        best = theirs_model(theirs, use_cache=False).logits[:, 8:-1].topk(2).values
    with parallel():
        ours_model = _mamba2_model(theirs_model, theirs_config)
        ours = generate(ours_model, prompt, count)
    return ours.tolist(), theirs.tolist(), (best[..., 0] - best[..., 1]).min().item()


def _mamba2_model(theirs, theirs_config):
    config = make_config(
        num_layers=3,
        hidden_size=32,
        hidden_dropout=0.0,
        layernorm_epsilon=1e-5,
        mamba_num_heads=8,
        mamba_num_groups=1,
        mamba_head_dim=8,
        mamba_state_dim=6,
    )
    model = HybridModel(
        config,
        hybrid_stack_spec("local"),
        vocab_size=48,
        max_sequence_length=64,
        hybrid_layer_pattern="MMM",
        position_embedding_type="none",
        share_embeddings_and_output_weights=False,
        parallel_output=False,
    ).eval()
    body = theirs.backbone
    state = {
        "embedding.word_embeddings.weight": body.embeddings.weight,
        "output_layer.weight": theirs.lm_head.weight,
        "decoder.final_norm.weight": body.norm_f.weight,
    }
    for n, layer in enumerate(body.layers):
        (mixer,) = layer_from_hf(
            layer.mixer.state_dict(), model.decoder.layers[n].mixer.global_dims
        )
        state |= {f"decoder.layers.{n}.mixer.{name}": x for name, x in mixer.items()}
        state[f"decoder.layers.{n}.norm.weight"] = layer.norm.weight
    missing, unknown = model.load_state_dict(state, strict=False)
    assert not unknown and all("_extra_state" in name for name in missing), (
        missing,
        unknown,
    )
    return model


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("next", "hybrid"),
        pytest.param("dense", "hybrid", marks=pytest.mark.slow),
        ("dense", "gpt"),
        ("kimi", "hybrid"),
        ("", "mamba2"),
    ],
)
def test_greedy_tokens_are_those_of_transformers(pools, hf_folder, name, kind):
    law = (continuations, hf_folder(name), kind) if name else (mamba2_continuations,)
    ((ours, theirs, margin),) = pools(1).run(*law)
    assert margin > 1e-4, "two tokens are as likely; this model tells nothing"
    assert ours == theirs


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--tokens", "999"],
            "token 999 is not of this model, whose 67 tokens are 0 to 66.",
        ),
        (["--tokens", "-1"], "token -1 is not of this model"),
        (
            ["--prompt", "hello"],
            "--prompt needs a tokenizer, and .* has none; use --tokens.",
        ),
        (["--count", "0"], "--count 0: use 1 or more."),
        (["--cou", "5"], "unrecognized arguments: --cou 5; did you mean --count"),
        (["--tokens", "1", "--prompt", "a"], "not allowed with argument --tokens"),
    ],
)
def test_the_example_refuses_in_a_line_before_it_builds_a_model(
    hf_folder, capsys, flags, words
):
    example = runpy.run_path(str(ROOT / "examples/generate.py"))
    with pytest.raises(SystemExit) as stopped:
        example["arguments"]([str(hf_folder("dense")), *flags])
    last = capsys.readouterr().err.splitlines()[-1]
    assert stopped.value.code == 2
    assert last.startswith("error: ") and re.search(words, last)


def test_the_example_names_a_folder_without_a_model(tmp_path, capsys):
    example = runpy.run_path(str(ROOT / "examples/generate.py"))
    with pytest.raises(SystemExit):
        example["arguments"]([str(tmp_path)])
    said = capsys.readouterr().err
    assert f"{tmp_path}/config.json does not exist" in said and said.count("\n") == 1


@pytest.mark.slow
def test_the_example_generates_from_a_folder(hf_folder):
    folder = hf_folder("dense")
    flags = ["--tokens", "5", "17", "3", "--count", "6"]
    # Compiling takes most of its time.
    done = python("examples/generate.py", folder, *flags, TORCHDYNAMO_DISABLE="1")
    # No notes of absent packages; that MTP weights are not loaded is worth a line.
    (said,) = done.stderr.splitlines()
    assert "were not loaded" in said
    tokens, rate = done.stdout.splitlines()[-2:]
    numbers = [int(token) for token in tokens.split()]
    assert numbers[:3] == [5, 17, 3] and len(numbers) == 9
    assert all(0 <= number < read_hf_config(folder).vocab_size for number in numbers)
    assert re.fullmatch(
        r"6 tokens at [\d.]+ tokens/s, prompt included, after a warm-up", rate
    )


def test_the_example_takes_text_and_prints_text_and_times_tokens_after_a_warm_up(
    hf_folder, monkeypatch, capsys
):
    """With stand-ins for the tokenizer, the model and generation."""
    example = runpy.run_path(str(ROOT / "examples/generate.py"))
    calls = []

    class Tokenizer:
        def __call__(self, text):
            return {"input_ids": [len(word) for word in text.split()]}

        def decode(self, tokens):
            return " ".join("x" * token for token in tokens)

    def generated(model, prompt, count, pick):
        calls.append(count)
        return torch.cat(
            [prompt, torch.full((1, count), 7, device=prompt.device)], dim=1
        )

    monkeypatch.setitem(
        example["arguments"].__globals__, "_tokenizer", lambda folder: Tokenizer()
    )
    monkeypatch.setattr("megatron_gdn.inference.generate.generate", generated)
    monkeypatch.setattr(
        "megatron_gdn.hf.build_model", lambda *_, **__: (torch.nn.Identity(), None)
    )
    monkeypatch.setattr("megatron_gdn.hf.load_hf_weights", lambda *_: None)
    names = ("start_one_process", "end_one_process")
    for name in names:
        monkeypatch.setattr(
            f"megatron_gdn.compat.one_process.{name}", lambda: torch.device("cpu")
        )
    command = [
        "generate.py",
        str(hf_folder("dense")),
        "--prompt",
        "two words",
        "--count",
        "2",
    ]
    monkeypatch.setattr("sys.argv", command)
    example["main"]()
    text, rate = capsys.readouterr().out.splitlines()
    assert text == "xxx xxxxx xxxxxxx xxxxxxx" and rate.startswith("2 tokens at ")
    assert len(calls) == 2 and calls[-1] == 2, "one that is not timed comes first"
