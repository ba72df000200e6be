"""Documents that Megatron-Bridge's packers have packed give the losses of the documents
alone."""

from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import megatron.core.utils as megatron_utils
import numpy as np
import pytest
import torch
from megatron.bridge.data.packing.algorithms import (
    create_hist,
    create_packing_strategy,
    fill_packing_strategy,
)
from megatron.bridge.data.packing.gpt_sft import GPTSFTPackedDataset
from megatron.bridge.data.packing.in_batch import (
    pack_right_padded_sequence_batch_to_mcore_thd,
)
from megatron.bridge.training.gpt_step import forward_step

import megatron_gdn
from megatron_gdn.compat.one_process import end_one_process, start_one_process
from megatron_gdn.context_parallel import local_indices
from tests.frameworks.bridge_models import bridged, published
from tests.frameworks.tiny_models import SIZES
from tests.parallel import parallel

EOS, LENGTHS = 0, (5, 12, 9)  # of inputs; a document has one token more, its last label
# the fourth would be attention, which has no cp here
LINEAR_LAYERS = {"num_hidden_layers": 3}


def documents() -> list[torch.Tensor]:
    generator = torch.manual_seed(2)
    return [
        torch.randint(1, SIZES["vocab_size"], (length + 1,), generator=generator)
        for length in LENGTHS
    ]


def packed_before_training(folder, multiple: int) -> dict:
    """A batch of Bridge's packed dataset; documents are padded at their end to
    ``multiple``."""
    rows = []
    for document in documents():
        ids = document.tolist()
        inputs = len(document) - 1
        padding = -inputs % multiple
        rows.append(
            {"input_ids": ids + padding * [EOS], "loss_mask": len(ids) * [True]}
        )
        rows[-1]["loss_mask"] += padding * [False]
    size = sum(len(row["input_ids"]) - 1 for row in rows) + 2 * multiple
    by_length, histogram = create_hist(rows, size)
    bins, _ = create_packing_strategy(histogram, size, "first_fit_decreasing")
    np.save(folder / "packed.npy", fill_packing_strategy(bins, by_length, size, EOS))
    dataset = GPTSFTPackedDataset(
        str(folder / "packed.npy"),
        SimpleNamespace(eos_id=EOS),
        pad_seq_to_mult=multiple,
        max_seq_length=size,
        pad_to_max_length=True,
        prompt_template="{input} {answer}",
        truncation_field="input",
    )
    return dataset.collate_fn([dataset[0]])


def packed_in_the_batch(folder, multiple: int) -> dict:
    """Rows that are padded to the longest, packed by Bridge in the collate function."""
    width = max(LENGTHS)
    rows = {"tokens": [], "labels": [], "loss_mask": [], "attention_mask": []}
    for document in documents():
        padding = width - len(document) + 1
        rows["tokens"].append(torch.cat((document[:-1], torch.full((padding,), EOS))))
        rows["labels"].append(torch.cat((document[1:], torch.full((padding,), -100))))
        mask = torch.arange(width) < len(document) - 1
        rows["loss_mask"].append(mask.float())
        rows["attention_mask"].append(mask)
    batch = {name: torch.stack(values) for name, values in rows.items()}
    batch["position_ids"] = torch.arange(width).expand(len(LENGTHS), -1)
    pack_right_padded_sequence_batch_to_mcore_thd(batch, pad_to_multiple_of=multiple)
    return batch


def thd_get_partitioned_indices(cu_seqlens, tokens, cp_size, cp_rank):
    """The zigzag places of one rank, as Transformer Engine tells them."""
    return local_indices(cu_seqlens.diff().tolist(), cp_size, cp_rank)


def bridges_loss(model, batch: dict) -> tuple[torch.Tensor, int]:
    """Sum of the losses of a batch, and how many tokens count, by Bridge's forward
    step."""
    settings = {"dataset": None, "rerun_state_machine.check_for_nan_in_loss": False}
    state = MagicMock(**{f"cfg.{name}": value for name, value in settings.items()})
    on_cpu = SimpleNamespace(thd_get_partitioned_indices=thd_get_partitioned_indices)
    with (
        patch("megatron.bridge.training.gpt_step.accumulate_flops_metadata"),
        patch.object(torch.Tensor, "cuda", lambda self, **_: self),
        patch.object(megatron_utils, "tex", on_cpu, create=True),
    ):
        losses, loss_of = forward_step(state, iter([batch]), model)
    loss, counted, _ = loss_of(losses)
    return loss, counted.item()


def loss_of_documents_alone(model) -> torch.Tensor:
    losses = []
    for document in documents():
        positions = torch.arange(len(document) - 1)[None]
        losses.append(
            model(document[None, :-1], positions, None, labels=document[None, 1:]).sum()
        )
    return torch.stack(losses).sum()


def gradients(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {
        name: p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


PACKERS = [packed_before_training, packed_in_the_batch]


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("pack", PACKERS)
def test_a_packed_batch_has_the_losses_and_gradients_of_its_documents(
    pack, multiple, tmp_path
):
    published("Qwen3.5", tmp_path, torch.float32)
    model, _ = bridged(tmp_path, torch.float32)
    packed, counted = bridges_loss(model, pack(tmp_path, multiple))
    alone = loss_of_documents_alone(model)
    assert counted == sum(LENGTHS)
    print(f"losses {packed.item():.6f}, of the documents alone {alone.item():.6f}")
    # Under 16 roundings on the way to a logit and two in the loss; their sum is rounded
    # once more.
    rounding = 32 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(packed, alone, rtol=rounding, atol=0)
    expected = gradients(model, alone)
    found = gradients(model, packed)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        # A gradient is a sum over tokens and a backward through what the forward
        # rounded.
        atol = 2 * rounding * gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=atol, msg=name)


def loss_of_this_rank(folder, pack) -> tuple[float, int]:
    with parallel(cp=2):
        megatron_gdn.patch_megatron()
        model, _ = bridged(folder, torch.float32, context_parallel_size=2)
        loss, counted = bridges_loss(model, pack(folder, 4))
        return loss.item(), counted


@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.usefixtures("forked_with_the_stand_in")
def test_two_context_parallel_ranks_have_the_losses_of_one(pack, pools, tmp_path):
    published("Qwen3.5", tmp_path, torch.float32, **LINEAR_LAYERS)
    start_one_process()
    megatron_gdn.patch_megatron()
    model, _ = bridged(tmp_path, torch.float32)
    expected = loss_of_documents_alone(model).item()
    end_one_process()
    of_ranks = pools(2).run(loss_of_this_rank, tmp_path, pack)
    loss, counted = (sum(values) for values in zip(*of_ranks, strict=True))
    assert counted == sum(LENGTHS)
    assert abs(loss - expected) <= 32 * torch.finfo(torch.float32).eps * expected
