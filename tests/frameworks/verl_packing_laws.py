"""Documents that verl packs and cuts for context-parallel ranks have their own logits."""

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor
from verl.models.mcore.util import postprocess_thd_engine, preprocess_thd_engine

import megatron_gdn
from megatron_gdn.compat.one_process import end_one_process, start_one_process
from tests import ranks
from tests.frameworks.patch_laws import SIZES, VOCABULARY, gpt_block, mixer
from tests.parallel import make_config, parallel

LENGTHS = [9, 5, 11]


def built(cp: int) -> GPTModel:
    megatron_gdn.patch_megatron()
    torch.manual_seed(0)
    config = make_config(
        num_layers=2, experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[1, 1], context_parallel_size=cp, **SIZES,
    )  # fmt: skip
    model = GPTModel(
        config, gpt_block(config, vp_stage=None), vocab_size=VOCABULARY, max_sequence_length=32,
        position_embedding_type="rope",
    )  # fmt: skip
    assert isinstance(mixer(model), megatron_gdn.GatedDeltaNet)
    return model


def documents() -> list[Tensor]:
    ids = torch.randint(VOCABULARY, (sum(LENGTHS),), generator=torch.manual_seed(1))
    return list(ids.split(LENGTHS))


def packed_logits(cp: int) -> list[Tensor]:
    with parallel(cp=cp), torch.no_grad():
        ids = torch.nested.as_nested_tensor(documents(), layout=torch.jagged)
        rows, packed, _ = preprocess_thd_engine(ids)
        logits = built(cp)(rows, None, None, packed_seq_params=packed)
        return list(postprocess_thd_engine(logits, packed, ids, len(LENGTHS)).unbind())


@pytest.mark.parametrize("cp", [1, 2])
def test_packed_documents_have_the_logits_of_each_alone(cp, pools, monkeypatch):
    imported = ["tests.frameworks.behind_te_on_cpu", *ranks._IMPORTED_ONCE]
    monkeypatch.setattr(ranks, "_IMPORTED_ONCE", imported)
    start_one_process()
    with torch.no_grad():
        model = built(1)
        expected = torch.cat([model(each[None], None, None)[0] for each in documents()])
    megatron_gdn.patch_megatron(gdn=False)
    end_one_process()
    rounding = 16 * torch.finfo(torch.float32).eps * expected.abs().max().item()
    for found in pools(cp).run(packed_logits, cp):
        torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=rounding)
