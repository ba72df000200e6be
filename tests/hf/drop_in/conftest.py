"""Models are built once for a file and copied for a test that changes them."""

import copy
from functools import cache

import pytest

from megatron_gdn.hf import patch
from megatron_gdn.hf.drop_in.families import linear_attentions
from tests.hf.tiny_models import build

NEXT = "Qwen3NextForCausalLM"
DENSE = "Qwen3_5ForCausalLM"
MOE = "Qwen3_5MoeForCausalLM"
OLMO = "OlmoHybridForCausalLM"
QWEN4 = "Qwen4ExpForCausalLM"
KIMI = "KimiLinearForCausalLM"
BAILING = "BailingHybridForCausalLM"
GLM = "Glm5NextForConditionalGeneration"  # its attention takes no documents
FAMILIES = [NEXT, DENSE, MOE, OLMO, QWEN4, KIMI, BAILING]
VISION = "Qwen3_5ForConditionalGeneration"
VISION_MOE = "Qwen3_5MoeForConditionalGeneration"


def mixer_of(model):
    """The linear attention of the first layer."""
    text = getattr(model.model, "language_model", model.model)
    return next(linear_attentions(text.layers[0]))


def results(model, tokens, sources, weight):
    """Logits and the gradients of every parameter, for each of ``sources``."""
    made = []
    for told in sources:
        model.zero_grad()
        logits = model(tokens, use_cache=False, **told).logits
        logits.backward(weight)
        made += [logits, *(p.grad for p in model.parameters() if p.grad is not None)]
    return made


def in_float64(model):
    """The same model in float64, for which fused experts have no code."""
    if any(name.endswith("experts") for name, _ in model.named_modules()):
        model.set_experts_implementation("eager")
    return model.double()


@pytest.fixture(scope="package")
def fresh():
    """``fresh(family)``: a tiny transformers model of its own, always of the same
    weights."""
    built = cache(build)
    return lambda family: copy.deepcopy(built(family))


@pytest.fixture(scope="package")
def patched(fresh):
    """``patched(family, **options)``: such a model after :func:`patch`."""

    def make(family=DENSE, **options):
        model = fresh(family)
        patch(model, **options)
        return model

    return make
