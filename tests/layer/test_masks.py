"""Every kind of layer refuses the same attention masks, and computes the same with the
others."""

import pytest
import torch
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.tensor_parallel import random
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megatron_gdn.compat.torch_norm import TorchRMSNorm
from megatron_gdn.mixers.base import RecurrentMixer
from megatron_gdn.specs import hybrid_stack_spec, mamba2_spec
from megatron_gdn.specs.layer import BIAS_DROPOUT_ADD
from tests.parallel import alone, hybrid_model, model_config

pytestmark = pytest.mark.usefixtures("one_rank")

TOKENS = 8
END = 9


def causal():
    return torch.ones(TOKENS, TOKENS).triu(1).bool()[None, None]


def of_megatrons_dataset(tokens):
    """What Megatron's dataset makes of one sample, in a batch."""
    made = _get_ltor_masks_and_position_ids(tokens, END, False, True, False, True)
    return made[0][None]


def of_documents():
    return of_megatrons_dataset(torch.tensor([1, 2, END, 3, 4, 5, 6, 7]))


def of_one_document():
    return of_megatrons_dataset(torch.tensor([1, 2, 3, 4, 5, 6, 7, END]))


def of_padding():
    return torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]])


def of_padding_first():
    return of_padding().flip(-1)


def of_nothing():
    return torch.ones(1, TOKENS)


def built(letter):
    """``"gdn2"`` is a 'G' of another config, ``"gdp"`` an 'M' of another stack."""
    variant = {"experimental_attention_variant": "gdn2"} if letter == "gdn2" else {}
    spec = None
    if letter == "gdp":
        variant = {"mamba_num_heads": 4, "mamba_num_groups": 2}
        spec = hybrid_stack_spec("local", gdp={})
    pattern = {"gdn2": "G", "gdp": "M"}.get(letter, letter)
    return hybrid_model(model_config(pattern, **variant), pattern, spec).decoder


EACH = pytest.mark.parametrize("letter", ["G", "gdn2", "K", "M", "gdp"])


@EACH
@pytest.mark.parametrize("mask", [of_documents, of_padding, of_padding_first])
def test_masks_of_documents_and_of_padding_are_refused(letter, mask):
    with pytest.raises(
        NotImplementedError, match="not a causal mask.*--reset-attention-mask"
    ):
        built(letter)(torch.randn(TOKENS, 1, 24), attention_mask=mask())


@EACH
@pytest.mark.parametrize("mask", [causal, of_one_document, of_nothing])
def test_masks_that_mask_the_future_alone_change_no_bit(letter, mask):
    stack = built(letter)
    x = torch.randn(TOKENS, 1, 24)
    assert torch.equal(stack(x, attention_mask=mask()), stack(x, attention_mask=None))


def recomputed_by_megatron(stack):
    config = stack.config
    config.recompute_granularity = "full"
    config.recompute_method = "uniform"
    config.recompute_num_layers = 1


def recomputed_by_the_mixer(stack):
    """As with --recompute-modules gdn."""
    mixers = [x for x in stack.modules() if isinstance(x, RecurrentMixer)]
    for mixer in mixers:
        mixer.recompute_layer = True
    assert mixers


@pytest.mark.parametrize("recompute", [recomputed_by_megatron, recomputed_by_the_mixer])
@pytest.mark.parametrize("letter", ["G", "M"])
def test_a_mask_is_refused_in_a_recomputed_layer(letter, recompute, monkeypatch):
    # An error inside Megatron's checkpoint leaves Megatron's switch on, also for later
    # tests.
    monkeypatch.setattr(random, "IS_CHECKPOINTING", False)
    stack = built(letter)
    recompute(stack)
    x = torch.randn(TOKENS, 1, 24, requires_grad=True)
    with pytest.raises(NotImplementedError, match="not a causal mask"):
        stack(x, attention_mask=of_documents())


def test_a_mamba_layer_of_another_spec_checks_the_mask_and_forgets_it():
    parts = MambaLayerSubmodules(
        norm=TorchRMSNorm, mixer=mamba2_spec("local"), mamba_bda=BIAS_DROPOUT_ADD
    )
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    spec = ModuleSpec(module=MambaLayer, submodules=parts)
    layer = build_module(spec, model_config("M"), pg_collection=groups)
    x = torch.randn(8, 1, 24)
    with pytest.raises(NotImplementedError, match="not a causal mask"):
        layer(x, of_documents())
    assert torch.equal(layer(x), layer(x, attention_mask=causal()))


class Other(torch.nn.Module):
    """A mixer that is none of ours."""

    def __init__(self, config, d_model, **_):
        super().__init__()

    def forward(self, hidden_states, **_):
        return 2 * hidden_states, None


def test_a_mamba_layer_of_another_mixer_stays_as_it_is():
    parts = MambaLayerSubmodules(mixer=Other, mamba_bda=BIAS_DROPOUT_ADD)
    built("M")  # now Megatron's layer is changed
    layer = MambaLayer(model_config("M"), parts, pg_collection=alone())
    before = dict(vars(layer.mixer))
    x = torch.randn(8, 1, 24)
    assert torch.equal(layer(x, of_documents()), 3 * x)
    assert vars(layer.mixer) == before
