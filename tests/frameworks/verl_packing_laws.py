"""Documents that verl packs and cuts for context-parallel ranks have their own
logits."""

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor
from verl.models.mcore.util import postprocess_thd_engine, preprocess_thd_engine

import megatron_gdn
from megatron_gdn.compat.one_process import end_one_process, start_one_process
from tests.frameworks.patch_laws import VOCABULARY, gpt, mixer
from tests.frameworks.tiny_models import require_logits
from tests.parallel import parallel

LENGTHS = [9, 5, 11]


def built(cp: int) -> GPTModel:
    megatron_gdn.patch_megatron()
    model = gpt(num_layers=2, linear_attention_freq=[1, 1], context_parallel_size=cp)
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
@pytest.mark.usefixtures("forked_with_the_stand_in")
def test_packed_documents_have_the_logits_of_each_alone(cp, pools):
    start_one_process()
    with torch.no_grad():
        model = built(1)
        expected = torch.cat([model(each[None], None, None)[0] for each in documents()])
    megatron_gdn.patch_megatron(gdn=False)
    end_one_process()
    for found in pools(cp).run(packed_logits, cp):
        require_logits("packed", torch.cat(found), expected)
