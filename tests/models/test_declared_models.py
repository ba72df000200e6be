"""What published models say of themselves: settings, flags, sizes and counts."""

from collections import Counter
from pathlib import Path

import pytest

from megatron_gdn.hf import megatron_flags
from megatron_gdn.hf.build import megatron_arguments
from megatron_gdn.models import find
from tests.in_words import in_words, read, write

FILE = Path(__file__).with_name("declared_models.json")
# Of each architecture, dense and with experts, with tied embeddings and without.
MODELS = (
    "tiny",
    "Qwen3-Next-80B-A3B",
    "Qwen3.5-0.8B",
    "Qwen3.5-35B-A3B",
    "Nemotron-H-8B",
    "Nemotron-3-Nano-30B-A3B",
    "Kimi-Linear-48B-A3B",
)


def or_refusal(function, *arguments):
    try:
        return in_words(function(*arguments))
    except NotImplementedError:
        return "refused"


def declared(name):
    model = find(name)
    layers = Counter(str(in_words(x)) for x in model.stack.layers)
    found = {
        "config": in_words(model.hf),
        "options": in_words([model.hf.kda_options, model.hf.mamba_options]),
        "published options": in_words(model.hf.published_options),
        "gains minus 1": model.hf.stores_gains_minus_1,
        "storage": model.hf.storage,
        "layers": sorted(layers.items()),
        "dims": in_words(model.dims),
        "sizes": [model.tensor_parallel_sizes(), model.headwise_sizes(1)],
    }
    for kind in ("gpt", "hybrid"):
        found |= {
            f"settings of {kind}": or_refusal(model.hf.megatron_settings, kind),
            f"flags of {kind}": or_refusal(megatron_flags, model.hf, kind),
            f"arguments of {kind}": or_refusal(
                lambda hf, kind: vars(megatron_arguments(hf, kind)), model.hf, kind
            ),
        }
    return in_words(found)


@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_stays_itself(name):
    """``python -m tests.models.test_declared_models`` writes the file."""
    assert declared(name) == read(FILE)[name]


if __name__ == "__main__":
    write(FILE, {name: declared(name) for name in MODELS})
