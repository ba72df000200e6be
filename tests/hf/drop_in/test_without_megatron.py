"""The drop-in where megatron-core is not installed: imported, patched and trained."""

import pytest
import torch

from tests.hf.drop_in.conftest import DENSE, KIMI, NEXT, in_float64
from tests.parallel import assert_close
from tests.processes import python_without

FAMILIES = [NEXT, DENSE, KIMI]
DOCUMENTS = [[3, 17, 5, 60, 2], [8, 41, 9, 22, 1, 7, 30], [66, 4, 12, 50]]
TRAIN = """
import torch
from megatron_gdn.hf import PackingCollator, assert_no_packing_leak, patch
from tests.hf.tiny_models import build

found = {{}}
for family in {families}:
    model = build(family)
    patch(model, attention="gathered")
    batch = PackingCollator()([{{"input_ids": ids}} for ids in {documents}])
    count = (batch["shift_labels"] >= 0).sum()
    model(**batch, use_cache=False, num_items_in_batch=count).loss.backward()
    given = {{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}
    found[family] = given
    assert_no_packing_leak(model)
assert "megatron" not in sys.modules
torch.save(found, sys.argv[1])
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("found")
    file = folder / "gradients.pt"
    train = TRAIN.format(families=FAMILIES, documents=DOCUMENTS)
    python_without("megatron", train, folder, file)
    return torch.load(file)


def gradients(model) -> dict[str, torch.Tensor]:
    """Of transformers' own model, which is given one document after the other."""
    labels = sum(len(ids) - 1 for ids in DOCUMENTS)
    for ids in DOCUMENTS:
        tokens = torch.tensor([ids])
        model(
            tokens, labels=tokens, use_cache=False, num_items_in_batch=labels
        ).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_packed_documents_are_those_of_each_alone(fresh, found, family):
    """fp32; where transformers errs by more than 1e-5, they may differ by that."""
    ours = found[family]
    theirs = gradients(fresh(family))
    wider = gradients(in_float64(fresh(family)))
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        noise = ((gradient - wider[name]).abs().max() / gradient.abs().max()).item()
        assert_close(name, ours[name], gradient, 1e-5 + 2 * noise)
