"""A Kimi Linear of Transformer Engine's modules; test_patch.py runs this file."""

import pytest
import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megatron_gdn.hf import (
    build_model,
    compare_folders,
    load_hf_weights,
    read_hf_config,
    save_hf_weights,
)
from megatron_gdn.mixers.attention import TorchAttention
from megatron_gdn.mixers.latent_attention import LatentAttention
from megatron_gdn.specs import kimi_linear_stack_spec
from tests.distributed.layer_laws import thd
from tests.frameworks import te_on_cpu
from tests.hf.model_laws import hf_model
from tests.hf.tiny_models import make_folder
from tests.parallel import assert_close
from tests.trees import random_tree, separately

pytestmark = pytest.mark.usefixtures("one_process")
LENGTHS = (9, 68, 3)


@pytest.fixture(scope="module", params=["kimi", "kimi saved"])
def folder(request, tmp_path_factory):
    made = tmp_path_factory.mktemp("kimi") / "hf"
    make_folder(request.param, made)
    return made


def build(folder, **options):
    settings = {"dtype": torch.float32, "parallel_output": False, **options}
    model, _ = build_model(folder, modules="te", **settings)
    load_hf_weights(model, folder)
    return model


def logits(model, tokens, params) -> torch.Tensor:
    rows = torch.arange(len(tokens))[None]
    return model(tokens[None], rows, None, packed_seq_params=params)[0, :, :67]


def test_this_runs_behind_the_stand_in():
    assert te_on_cpu.installed()


def test_packed_documents_have_the_logits_of_transformers(folder):
    model = build(folder)
    (latent,) = (m for m in model.modules() if isinstance(m, MLASelfAttention))
    assert isinstance(latent, LatentAttention)
    assert isinstance(latent.core_attention, TEDotProductAttention)
    tokens = torch.randint(67, (sum(LENGTHS),))
    theirs = hf_model(folder)
    with torch.no_grad():
        ours = logits(model, tokens, thd(LENGTHS))
        apart = [
            theirs(row[None], use_cache=False).logits[0]
            for row in tokens.split(LENGTHS)
        ]
        alone = logits(model, tokens, None)
        whole = theirs(tokens[None], use_cache=False).logits[0]
    assert_close("packed", ours, torch.cat(apart), 1e-4)
    assert_close("a batch", alone, whole, 1e-4)


def test_the_spec_of_a_launch_builds_the_same_model(folder):
    config = read_hf_config(folder)
    kda = {"kda": config.kda_options, "mla": {"norm_epsilon": 1e-6}}
    model = build(folder)
    spec = kimi_linear_stack_spec("te", **kda)
    assert build(folder, spec=spec).state_dict().keys() == model.state_dict().keys()
    made = kimi_linear_stack_spec.submodules.mla_layer.submodules.self_attention
    assert made.module is LatentAttention and made.params["norm_epsilon"] == 1e-6


def test_it_saves_the_bits_of_its_source(folder, tmp_path):
    save_hf_weights(build(folder), tmp_path / "saved", like=folder)
    assert list(compare_folders(folder, tmp_path / "saved")) == []


def test_the_latent_norms_have_their_own_epsilon(folder):
    (latent,) = (m for m in build(folder).modules() if isinstance(m, LatentAttention))
    assert isinstance(latent.kv_layernorm, type(TENorm(latent.config, 4)))
    assert latent.kv_layernorm.eps == 1e-6


@pytest.mark.parametrize("seed", range(2))
def test_a_tree_has_the_logits_of_its_sequences(folder, seed):
    model = build(folder)
    tree = random_tree(seed, longest=24)
    apart = separately(tree)
    tokens = torch.randint(67, (sum(tree.slots),))
    params = thd(apart.documents.lengths)
    with torch.no_grad():
        found = logits(model, tokens, tree.params)[apart.tokens]
        expected = logits(model, tokens[apart.source], params)[apart.kept]
    assert_close("logits", found, expected, 1e-4)
    assert any(isinstance(m, TorchAttention) for m in _made(model))


def _made(model) -> list:
    (latent,) = (m for m in model.modules() if isinstance(m, LatentAttention))
    return latent.core_attention._tree_attention
