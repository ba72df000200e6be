"""Packed batches, shares of them, and the example that trains on both."""

import math
import re
import runpy
import sys

import pytest
import torch

from megatron_gdn.hf import PackingCollator, context_parallel_share
from tests.examples.conftest import EXAMPLES
from tests.hf.drop_in.conftest import FAMILIES
from tests.hf.drop_in.test_sources import read
from tests.hf.tiny_models import model_class
from tests.processes import torchrun

DOCUMENTS = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}, {"input_ids": [9, 10]}]


class Mesh:
    def __init__(self, size: int, rank: int) -> None:
        self.size = lambda: size
        self.get_local_rank = lambda: rank


def test_documents_are_laid_end_to_end_and_predict_nothing_across():
    batch = PackingCollator(pad_to_multiple_of=4)(DOCUMENTS)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 0, 1]]
    assert batch["shift_labels"].tolist() == [[6, 7, -100, -100, 10, -100, -100, -100]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, -100, 10, -100, -100]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 4, 6, 8]
    assert batch["cu_seq_lens_q"].dtype == torch.int32 and batch["max_length_q"] == 3
    same = {"cu_seqlens": batch["cu_seq_lens_q"], "position_ids": batch["position_ids"]}
    assert read(**same) == read(position_ids=batch["position_ids"])
    nothing = {"input_ids": []}
    among = PackingCollator(4)([nothing, *DOCUMENTS[:2], nothing, *DOCUMENTS[2:]])
    for name in ("input_ids", "labels", "shift_labels", "position_ids"):
        assert torch.equal(among[name], batch[name]), "a document without tokens"
    with pytest.raises(ValueError, match="pad_to_multiple_of=0 must be at least 1"):
        PackingCollator(0)


@pytest.mark.parametrize("layout", ["zigzag_buffer", "contiguous", "zigzag"])
def test_shares_hold_every_token_once(layout):
    documents = DOCUMENTS
    if layout == "zigzag":
        documents = [{"input_ids": [*range(5, 13)]}, {"input_ids": [*range(16)]}]
    batch = PackingCollator(pad_to_multiple_of=8)(documents)
    shares = [context_parallel_share(batch, Mesh(4, rank), layout) for rank in range(4)]
    held = torch.cat([share["input_ids"] for share in shares], 1)
    assert held.sort().values.tolist() == batch["input_ids"].sort().values.tolist()
    assert all(share["cu_seq_lens_q"] is batch["cu_seq_lens_q"] for share in shares)
    if layout == "zigzag":  # of each document two pieces
        assert shares[0]["position_ids"].tolist() == [[0, 7, 0, 1, 14, 15]]
    else:
        assert shares[0]["position_ids"].shape == (1, 2)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "no documents"),
        ([{"input_ids": []}, {"input_ids": []}], "no tokens"),
        ([{"labels": [1, 1]}], "document 1 has 3 input_ids and 2 labels"),
        ([{"attention_mask": [1, 1, 0]}], "document 1 has padding"),
        ([{"loss_mask": [1, 1, 0]}], "document 1 has 'loss_mask'"),
        (
            [{"labels": [6, 7, -100]}],
            "labels of document 1 are its input_ids one token ahead",
        ),
        (
            [{"labels": [-100, 7, 8]}],
            "labels of document 1 are its input_ids one token ahead",
        ),
    ],
)
def test_what_cannot_be_packed_or_would_be_lost_is_refused(documents, message):
    if documents and "input_ids" not in documents[0]:
        documents = [{"input_ids": [1]}, {"input_ids": [5, 6, 7], **documents[0]}]
    with pytest.raises(ValueError, match=message):
        PackingCollator()(documents)
    PackingCollator()([{"input_ids": [5, 6], "attention_mask": [1, 1]}])


@pytest.mark.parametrize(
    ("tokens", "labels"),
    [
        ([5, 6, 7], [5, 6, 7]),
        ([5, 5, 5], [5, 5, 5]),
        ([5, 6, 6], [-100, 6, 6]),
        ([5, 6, 7], [-100, -100, 7]),
        ([5, 6, 7], [5, 7, 7]),
        ([5, 6, 7], [8, 9, 10]),
        ([5], [5]),
        ([5, 6, 7], [-100] * 3),
    ],
)
def test_labels_at_their_own_tokens_are_taken(tokens, labels):
    batch = PackingCollator()([{"input_ids": tokens, "labels": labels}])
    assert batch["shift_labels"].tolist() == [[*labels[1:], -100]]


def losses_of(*flags: str) -> list[float]:
    said = torchrun(2, "examples/finetune_transformers.py", "--steps", "11", *flags)
    assert "no packed document reaches another" in said
    return [float(x) for x in re.findall(r"loss (\d+\.\d+)", said)]


@pytest.mark.parametrize(
    ("script", "flags", "words"),
    [
        ("finetune_transformers.py", ["--steps", "0"], "--steps 0: use 1 or more."),
        (
            "finetune_transformers.py",
            ["--documents", "999"],
            "--documents 999: use 1 to ",
        ),
        (
            "finetune_transformers.py",
            ["--step", "1"],
            "unrecognized arguments: --step 1",
        ),
        (
            "finetune_transformers.py",
            [],
            "start it by torchrun --nproc_per_node=2 examples/fi",
        ),
        (
            "finetune_with_trainer.py",
            ["--replicas", "2"],
            "--replicas 2 does not divide 3 ranks",
        ),
        (
            "finetune_with_trainer.py",
            ["--save", "README.md"],
            "--save README.md is a file",
        ),
    ],
)
def test_the_examples_refuse_what_they_cannot_do(
    script, flags, words, monkeypatch, capsys
):
    monkeypatch.chdir(EXAMPLES.parent)
    monkeypatch.setattr(sys, "argv", [script, *flags])
    monkeypatch.setenv("WORLD_SIZE", "3")
    if flags:
        monkeypatch.setenv("RANK", "0")
    # in plain torch: the examples import them with the kernels of fla
    for family in FAMILIES:
        model_class(family)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(EXAMPLES / script))["arguments"]()
    assert stopped.value.code == 2 and words in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what the CPU prints")
def test_the_example_trains_over_two_ranks_sharded_or_not():
    """AdamW's first steps are of the gradient's sign, so roundings grow to some
    1e-3."""
    first, last = losses = losses_of()
    assert first == pytest.approx(math.log(256), abs=0.2) and last < first - 1
    assert losses_of("--fully-shard") == pytest.approx(losses, abs=5e-3)
