"""A function given by ``--spec``, handed to a GPT model uncalled, as Megatron-LM's dev does."""

import pytest
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import transformer_block

from megatron_gdn import GatedDeltaNet
from megatron_gdn.mixers.attention import TorchSelfAttention
from megatron_gdn.specs import gpt_block_spec
from tests.distributed.gpt_laws import gpt_config
from tests.parallel import make_config

pytestmark = pytest.mark.usefixtures("one_rank")


def mixers(spec) -> list[type]:
    config = gpt_config((1, 0, 1, 0), linear_attention_freq=2)
    model = GPTModel(config, spec, vocab_size=32, max_sequence_length=8)
    return [type(layer.self_attention) for layer in model.decoder.layers]


def of_its_own(config):
    return gpt_block_spec(config, backend="reference")


def of_a_stage(config, vp_stage=None):
    assert vp_stage is None
    return gpt_block_spec(config, vp_stage=vp_stage)


@pytest.mark.parametrize("spec", [gpt_block_spec, of_its_own, of_a_stage])
def test_a_model_calls_a_function_given_as_its_spec(spec):
    assert mixers(spec) == [GatedDeltaNet, TorchSelfAttention] * 2


def test_it_hands_on_the_stages_that_the_function_takes():
    config, asked = make_config(), []

    def spec(config, vp_stage, pp_rank):
        asked.append((config, vp_stage, pp_rank))
        return transformer_block.TransformerBlockSubmodules(layer_specs=[])

    transformer_block._get_block_submodules(config, spec, 1, pp_rank=0)
    assert asked == [(config, 1, 0)]


def test_what_is_no_spec_is_refused_as_before():
    with pytest.raises(Exception, match="specialize for int"):
        mixers(3)
