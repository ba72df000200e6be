"""TorchAttention by itself, on one rank."""

import pytest
import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron_gdn.mixers.attention.attention import TorchAttention
from tests.mamba_mixers import alone
from tests.parallel import make_config


@pytest.mark.usefixtures("one_rank")
def test_on_whole_sequences_megatrons_own_forward_reads_no_context_parallelism(monkeypatch):
    """Megatron-LM's dev branch gathers keys and values by the config, and wants a mask for it."""
    sizes, forward = [], DotProductAttention.forward

    def watched(self, *args, **kwargs):
        sizes.append(self.config.context_parallel_size)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(DotProductAttention, "forward", watched)
    attention = TorchAttention(
        config := make_config(context_parallel_size=2), 1, AttnMaskType.causal, "self",
        pg_collection=alone(),
    )  # fmt: skip
    q, k, v = torch.randn(3, 5, 1, 4, 6)
    with attention.on_whole_sequences():
        attention(q, k, v, None)
    assert sizes == [1]
    assert attention.config is config and config.context_parallel_size == 2
