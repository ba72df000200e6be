"""Megatron's own specs build our layers after one call; test_patch.py runs this
file."""

import copy
import pickle

import pytest
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec as gpt_block,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mamba_mixer import MambaMixer

import megatron_gdn
import megatron_gdn.specs
from tests.distributed.model_laws import leaves, metadata
from tests.frameworks import te_on_cpu
from tests.frameworks.tiny_models import require_falling, require_logits
from tests.parallel import make_config
from tests.upstream import upstream_on_cpu
from tests.upstream_kda import HAS_KDA

VOCABULARY = 32
TOKENS = 24
Theirs = upstream_on_cpu().GatedDeltaNet
SIZES = {
    "ffn_hidden_size": 32,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "apply_rope_fusion": False,
}

pytestmark = pytest.mark.usefixtures("one_process")


def hybrid(spec=hybrid_stack_spec, **changes):
    torch.manual_seed(0)
    return HybridModel(
        make_config(**{"num_layers": 4, **SIZES, **changes}),
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=TOKENS,
        hybrid_layer_pattern="G-*-",
        position_embedding_type="rope",
    )


def gpt(**changes):
    torch.manual_seed(0)
    variant = {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": 2,
    }
    config = make_config(**{"num_layers": 4, **variant, **SIZES, **changes})
    return GPTModel(
        config,
        gpt_block(config, vp_stage=None),
        vocab_size=VOCABULARY,
        max_sequence_length=TOKENS,
        position_embedding_type="rope",
    )


def mixer(model):
    return model.decoder.layers[0].self_attention


def logits(model) -> torch.Tensor:
    tokens = torch.randint(
        VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        return model(tokens, torch.arange(TOKENS).expand(2, -1), None)


def test_this_runs_behind_the_stand_in():
    assert HAVE_TE and te_on_cpu.installed()


@pytest.mark.parametrize("build", [hybrid, gpt])
def test_a_spec_of_megatrons_builds_our_layer_and_the_same_model(build):
    theirs = build()
    megatron_gdn.patch_megatron(gdn={"backend": "reference"})
    ours = build()
    assert (
        type(mixer(theirs)) is Theirs
        and type(mixer(ours)) is megatron_gdn.GatedDeltaNet
    )
    assert mixer(ours).backend == "reference"
    assert theirs.sharded_state_dict().keys() == ours.sharded_state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    # Under 16 roundings on the way to a logit in each model.
    require_logits("ours", logits(ours), logits(theirs), roundings=2 * 16)
    megatron_gdn.patch_megatron(gdn=False)
    assert type(mixer(build())) is Theirs


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_copied_or_pickled_spec_builds_our_layer(way):
    megatron_gdn.patch_megatron()
    assert isinstance(mixer(hybrid(way(hybrid_stack_spec))), megatron_gdn.GatedDeltaNet)


def test_a_layer_that_was_built_before_stays_and_can_be_copied():
    theirs = hybrid()
    before = logits(theirs)
    megatron_gdn.patch_megatron()
    theirs.decoder.layers[0].self_attention = copy.copy(mixer(theirs))
    assert type(mixer(theirs)) is Theirs
    assert torch.equal(logits(theirs), before)


def test_one_line_says_what_was_replaced_and_what_was_left(caplog):
    megatron_gdn.patch_megatron(gdn={"backend": "fla"})
    assert [record.message for record in caplog.records] == [
        "Megatron's GatedDeltaNet is built as "
        "megatron_gdn.GatedDeltaNet(backend='fla'); Megatron's MambaMixer stays "
        "Megatron's."
    ]


def test_a_subclass_stays_what_it_is_and_is_named_once(caplog):
    class Permuted(Theirs):
        pass

    megatron_gdn.patch_megatron()
    spec = copy.deepcopy(hybrid_stack_spec)
    spec.submodules.gdn_layer.submodules.self_attention.module = Permuted
    assert type(mixer(hybrid(spec))) is type(mixer(hybrid(spec))) is Permuted
    named = [
        record.message for record in caplog.records if "Permuted" in record.message
    ]
    assert len(named) == 1 and "subclass of Megatron's GatedDeltaNet" in named[0]


def test_mamba_too_where_asked():
    spec = hybrid_stack_spec.submodules.mamba_layer.submodules.mixer
    assert spec.module is MambaMixer
    megatron_gdn.patch_megatron(gdn=False, mamba=True)
    model = HybridModel(
        make_config(num_layers=1, **SIZES),
        hybrid_stack_spec,
        vocab_size=VOCABULARY,
        max_sequence_length=TOKENS,
        hybrid_layer_pattern="M",
        position_embedding_type="none",
    )
    megatron_gdn.patch_megatron(gdn=False, mamba=False)
    assert isinstance(model.decoder.layers[0].mixer, megatron_gdn.Mamba2Mixer)
    assert logits(model).isfinite().all()


def test_a_step_of_training():
    megatron_gdn.patch_megatron()
    model = hybrid()
    positions = torch.arange(TOKENS).expand(2, -1)
    ids = positions % 7
    require_falling(
        lambda: model(ids, positions, None, labels=ids).mean(),
        model.parameters(),
        rate=0.05,
    )


RANKS = {"forget_rank": 4, "output_rank": 8}


@pytest.mark.parametrize("ranks", [{}, RANKS], ids=["full gates", "low ranks"])
def test_k_layers_of_transformer_engine_are_those_of_torch(ranks):
    """The same logits, under the same keys of checkpoints."""
    made = {}
    for modules in ("te", "local"):
        spec = megatron_gdn.specs.hybrid_stack_spec(modules, kda=ranks)
        torch.manual_seed(0)
        made[modules] = HybridModel(
            make_config(num_layers=2, **SIZES),
            spec,
            vocab_size=VOCABULARY,
            max_sequence_length=TOKENS,
            hybrid_layer_pattern="KK",
        )
    keys = [tensors_of(model) for model in made.values()]
    assert keys[0] == keys[1]
    made["local"].load_state_dict(made["te"].state_dict(), strict=False)
    torch.testing.assert_close(logits(made["te"]), logits(made["local"]))


def tensors_of(model) -> dict[str, tuple[int, ...]]:
    found = leaves(model.sharded_state_dict(metadata=metadata()))
    return {leaf.key: leaf.global_shape for leaf in found if hasattr(leaf, "dtype")}


@pytest.mark.skipif(not HAS_KDA, reason="needs a Megatron that has KimiDeltaAttention")
def test_k_layers_of_megatrons_own_spec_are_ours():
    megatron_gdn.patch_megatron(kda={"recompute": "light"})
    sizes = {"linear_num_value_heads": 4, "linear_value_head_dim": 8}
    model = HybridModel(
        make_config(num_layers=2, linear_cp_mode="headwise", **SIZES, **sizes),
        hybrid_stack_spec,
        vocab_size=VOCABULARY,
        max_sequence_length=TOKENS,
        hybrid_layer_pattern="KK",
    )
    layer = mixer(model)
    assert isinstance(layer, megatron_gdn.KimiDeltaAttention)
    assert layer.options.recompute == "light"
    assert logits(model).isfinite().all()
