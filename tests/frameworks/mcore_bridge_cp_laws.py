"""mcore-bridge's model of linear layers on two context-parallel ranks, cut by its own
loader."""

import pytest
import torch
from mcore_bridge import get_mcore_model, split_cp_inputs
from megatron.core.packed_seq_params import PackedSeqParams

import megatron_gdn
from megatron_gdn.compat.one_process import end_one_process, start_one_process
from tests.frameworks.mcore_bridge_laws import CudaIsTheCPU, config_of
from tests.frameworks.tiny_models import published, require_logits, tokens
from tests.parallel import parallel

LENGTHS = [8, 4, 12]
LINEAR_LAYERS = {"num_hidden_layers": 3}


def logits(folder, cp: int) -> torch.Tensor:
    """Of this rank's tokens of packed documents, ``[T / cp, vocabulary]``."""
    megatron_gdn.patch_megatron()
    config = config_of(folder, context_parallel_size=cp)
    (model,) = get_mcore_model(config)
    config.bridge.load_weights([model], str(folder))
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    longest = max(LENGTHS)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    ids, places = (split_cp_inputs(x, ends, 1) for x in (tokens()[:1], positions))
    with torch.no_grad():
        return model(ids, places, None, packed_seq_params=packed)[0]


def logits_of_this_rank(folder) -> tuple[torch.Tensor, torch.Tensor]:
    """And at which tokens they are."""
    with parallel(cp=2), CudaIsTheCPU():
        ends = torch.tensor([0, *LENGTHS]).cumsum(0)
        return logits(folder, 2), split_cp_inputs(torch.arange(sum(LENGTHS)), ends, 0)


@pytest.mark.usefixtures("forked_with_the_stand_in")
def test_two_context_parallel_ranks_have_the_logits_of_one(pools, tmp_path):
    published("Qwen3-Next", tmp_path, **LINEAR_LAYERS)
    start_one_process()
    with CudaIsTheCPU():
        expected = logits(tmp_path, 1)
    megatron_gdn.patch_megatron(gdn=False)
    end_one_process()
    for found, places in pools(2).run(logits_of_this_rank, tmp_path):
        require_logits("two ranks", found, expected[places])
