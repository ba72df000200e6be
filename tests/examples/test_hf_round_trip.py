"""The way round of the pages: import, three steps of the example, export,
transformers."""

import json
from pathlib import Path

import pytest
import torch

from megatron_gdn.hf import build_model, read_hf_config
from megatron_gdn.hf.__main__ import main
from pretraining.arguments import parse_args
from pretraining.corpus import read_paths
from pretraining.feed import Feed
from tests.examples.launching import run
from tests.hf.model_laws import hf_model, load_dist_checkpoint, logits_of
from tests.hf.tiny_models import build, model_class
from tests.parallel import parallel

STEPS = 3
ROWS = 4
LENGTH = 64


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "numbers.txt").write_text(" ".join(str(n * n) for n in range(600)))
    return folder


def untrained_model(family: str, **changes):
    """Small weights, which magnify no rounding; in fp32, as trained ones would be
    rounded."""
    # Not a multiple of 8 rows a rank: Megatron pads it, transformers does not.
    sizes = {"vocab_size": 300, "max_position_embeddings": LENGTH}
    config = build(family, **sizes, **changes).config
    torch.manual_seed(3)
    return model_class(family)(config)


FAMILIES = {
    "Qwen3NextForCausalLM": {"mlp_only_layers": [1]},
    "KimiLinearForCausalLM": {"q_lora_rank": None},
}


@pytest.fixture(scope="module", params=FAMILIES)
def way_round(request, text, tmp_path_factory) -> Path:
    """A folder with ``hf``, ``imported``, ``run`` (four steps, saved after three) and
    ``back``."""
    at = tmp_path_factory.mktemp("way_round")
    family = request.param
    untrained_model(family, **FAMILIES[family]).save_pretrained(at / "hf")
    assert main(["import", str(at / "hf"), str(at / "imported")]) == 0
    run(
        *("--hf-config", at / "hf", "--pretrained-checkpoint", at / "imported"),
        *(
            "--data",
            text,
            "--output-dir",
            at / "run",
            "--no-packing",
            "--sample-tokens=0",
        ),
        *(
            "--context-parallel-size=1",
            "--tensor-model-parallel-size=2",
            "--sequence-parallel",
        ),
        *(f"--seq-length={LENGTH}", f"--micro-batch-size={ROWS}"),
        *(
            f"--train-iters={STEPS + 1}",
            f"--save-interval={STEPS}",
            "--lr-warmup-iters=0",
        ),
        "--lr=6e-3",  # in three steps to somewhere
        cwd=at,
    )
    trained = at / "run" / "checkpoints" / f"iter_{STEPS:07d}"
    assert (
        main(["export", str(trained), str(at / "back"), "--like", str(at / "hf")]) == 0
    )
    return at


def example_logits(
    folder: Path, checkpoint: Path, tokens: torch.Tensor
) -> torch.Tensor:
    with parallel(1), torch.no_grad():
        model, config = build_model(
            folder, parallel_output=False, max_sequence_length=LENGTH
        )
        assert config.hidden_dropout == config.attention_dropout == 0.0
        load_dist_checkpoint(model, checkpoint)
        return logits_of(model.eval(), tokens, read_hf_config(folder).vocab_size)


@pytest.mark.slow
def test_transformers_computes_the_logits_of_the_trained_example(pools, way_round):
    torch.manual_seed(5)
    tokens = torch.randint(257, (2, LENGTH))
    trained = way_round / "run" / "checkpoints" / f"iter_{STEPS:07d}"
    (ours,) = pools(1).run(example_logits, way_round / "hf", trained, tokens)
    with torch.no_grad():
        theirs = hf_model(way_round / "back")(tokens, use_cache=False).logits
        untrained = hf_model(way_round / "hf")(tokens, use_cache=False).logits
    scale = theirs.abs().max()
    apart, moved = (
        (logits - theirs).abs().max() / scale for logits in (ours, untrained)
    )
    assert apart.item() < 1e-5
    assert moved.item() > 1e-2


@pytest.mark.slow
def test_transformers_has_the_loss_of_the_examples_next_step(way_round, text):
    """The same batch of text, through the exported files: the loss that the run
    recorded."""
    shape = {
        "seq_length": LENGTH,
        "micro_batch_size": ROWS,
        "packing": False,
        "multiple": 1,
    }
    place = {
        "cp_size": 1,
        "cp_rank": 0,
        "dp_size": 1,
        "dp_rank": 0,
        "device": torch.device("cpu"),
    }
    feed = Feed(read_paths([str(text)]), seed=1234, **shape, **place)
    *_, batch = (next(feed) for _ in range(STEPS + 1))
    with torch.no_grad():
        logits = hf_model(way_round / "back")(batch.tokens, use_cache=False).logits
    each = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.labels.flatten(), reduction="none"
    )
    expected = (each * batch.loss_mask.flatten()).sum() / batch.loss_mask.sum()
    lines = (way_round / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[STEPS] == pytest.approx(expected.item(), rel=1e-5)
    # Training went somewhere, and from the imported weights: the first loss is theirs.
    assert losses[STEPS] < losses[0]


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        (["--hidden-size=64"], "--hidden-size 64 is not the 24 of --hf-config"),
        # What the example's own model has: it stands there, so it counts.
        (["--hidden-size=128"], "--hidden-size 128 is not the 24 of --hf-config"),
        (["--mamba-num-heads=8"], "--mamba-num-heads is of M layers"),
        (
            ["--hybrid-layer-pattern=G-*-"],
            "--hybrid-layer-pattern G-*- is not the G-G-G-*-",
        ),
    ],
)
def test_a_size_beside_a_config_is_refused(tmp_path, refused, capsys, flags, advice):
    untrained_model("Qwen3_5ForCausalLM").save_pretrained(tmp_path)
    capsys.readouterr()
    assert advice in refused("--hf-config", tmp_path, *flags)


def test_a_vocabulary_without_room_for_bytes_is_refused(tmp_path, refused, capsys):
    build("Qwen3_5ForCausalLM").save_pretrained(tmp_path)
    capsys.readouterr()
    assert "a vocabulary of 67 tokens" in refused("--hf-config", tmp_path)


def first_update(folder: Path, checkpoint: Path, *flags: str) -> bool:
    """Whether a step of rate 0 leaves the loaded weights as they are."""
    from megatron_gdn.hf import load_hf_weights
    from pretraining.hf_model import load_pretrained
    from pretraining.model import build_training

    args = parse_args(
        ["--hf-config", str(folder), "--context-parallel-size=1", "--lr=0", *flags]
    )
    args.transformer_impl = "local"
    with parallel(1):
        training = build_training(args)
        load_pretrained(checkpoint, training)
        training.model.zero_grad_buffer()
        for parameter in training.model.parameters():
            parameter.main_grad.fill_(1.0)
        training.optimizer.step()
        dtype = torch.bfloat16 if args.bf16 else torch.float32
        filled, _ = build_model(folder, dtype=dtype)
        load_hf_weights(filled, folder)
        pairs = zip(training.model.parameters(), filled.parameters(), strict=True)
        return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("flags", [[], ["--bf16"]], ids=["fp32", "bf16"])
def test_the_optimizer_goes_on_from_the_loaded_weights(pools, tmp_path, flags):
    """In bf16 it holds fp32 weights of its own, which were the random ones."""
    untrained_model("Qwen3_5ForCausalLM").save_pretrained(tmp_path / "hf")
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "imported")]) == 0
    (kept,) = pools(1).run(first_update, tmp_path / "hf", tmp_path / "imported", *flags)
    assert kept


def test_a_folder_without_pretrained_weights_is_named(tmp_path, refused):
    said = refused("--pretrained-checkpoint", tmp_path)
    assert f"{tmp_path} is no distributed checkpoint" in said
