"""transformers' own forward on a CPU in an environment that has fla, which other tests hide as they
import transformers' models."""

import pytest
import torch

from tests.hf.drop_in.conftest import FAMILIES, mixer_of
from tests.processes import python

TOKENS = [[3, 17, 5, 60, 2, 8, 8, 41, 9]]
NEW = 4
# Which modules hold a family's functions.
SOURCES = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "qwen4_exp", "kimi_linear",
           "bailing_hybrid"]  # fmt: skip

IN_A_FRESH_PROCESS = """
import importlib, sys
import torch
for name in {sources}:  # fla is not hidden, so transformers takes its kernels
    importlib.import_module(f"transformers.models.{{name}}.modeling_{{name}}")
from megatron_gdn.hf import patch, plain_functions_on_cpu
from tests import bits_by_shape
from tests.hf.drop_in.conftest import mixer_of
from tests.hf.tiny_models import build

bits_by_shape.hold_if_asked()  # as in the process that compares
tokens, found = torch.tensor({tokens}), {{}}
for family in {families}:
    model = build(family)
    try:
        model(tokens)
        found[family, "as it is"] = "runs"
    except Exception as error:
        found[family, "as it is"] = str(error)
    if {patched}:
        patch(model)
    else:
        plain_functions_on_cpu(model)
    logits = model(tokens).logits
    logits.sum().backward()
    found[family, "logits"] = logits.detach()
    found[family, "gradient"] = mixer_of(model).conv1d.weight.grad
    found[family, "generated"] = model.generate(tokens, max_new_tokens={new}, do_sample=False)
torch.save(found, sys.argv[1])
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run here")
@pytest.mark.parametrize("patched", [True, False])
def test_unpacked_batches_and_generation_run_where_fla_is_installed(fresh, tmp_path, patched):
    """With the bits that transformers has where fla is not installed."""
    pytest.importorskip("fla")
    script = IN_A_FRESH_PROCESS.format(
        sources=SOURCES, tokens=TOKENS, families=FAMILIES, patched=patched, new=NEW
    )
    python("-c", script, tmp_path / "found.pt")
    found = torch.load(tmp_path / "found.pt")
    for family in FAMILIES:
        assert "0 active drivers" in found[family, "as it is"], "this law tests nothing"
        model, tokens = fresh(family), torch.tensor(TOKENS)
        logits = model(tokens).logits
        logits.sum().backward()
        gradient = mixer_of(model).conv1d.weight.grad
        generated = model.generate(tokens, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(found[family, "logits"], logits)
        assert torch.equal(found[family, "gradient"], gradient)
        assert torch.equal(found[family, "generated"], generated)
