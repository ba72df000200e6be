"""Shared prefixes in a model of Transformer Engine's modules; test_patch.py runs this
file."""

import pytest
import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as upstream
from megatron.core.transformer.attention import SelfAttention

from megatron_gdn import tree_packed_seq_params
from megatron_gdn.mixers.attention import TorchAttention, TorchSelfAttention
from megatron_gdn.specs import hybrid_stack_spec
from tests.distributed.layer_laws import thd
from tests.frameworks.patch_laws import TOKENS, VOCABULARY, hybrid
from tests.parallel import assert_close
from tests.trees import random_tree, separately

pytestmark = pytest.mark.usefixtures("one_process")


def build(**options):
    return hybrid(hybrid_stack_spec("te", backend="reference", **options))


def attention_of(model) -> torch.nn.Module:
    (found,) = (x for x in model.modules() if isinstance(x, SelfAttention))
    return found


def logits(model, tokens, params) -> torch.Tensor:
    rows = torch.arange(tokens.shape[1])[None]
    return model(tokens, rows, None, packed_seq_params=params)[0]


@pytest.fixture
def calls(monkeypatch):
    """Which attention ran."""
    seen = []
    for core in (TEDotProductAttention, TorchAttention):
        forward = core.forward

        def watched(self, *args, core=core, forward=forward, **kwargs):
            seen.append(core.__name__)
            return forward(self, *args, **kwargs)

        monkeypatch.setattr(core, "forward", watched)
    return seen


@pytest.mark.parametrize("seed", range(3))
def test_a_tree_runs_beside_transformer_engines_attention(calls, seed):
    """Logits and gradients, in fp32, of the sequences packed for Transformer Engine's
    attention."""
    model = build()
    tree = random_tree(seed, longest=TOKENS)
    apart = separately(tree)
    tokens = torch.randint(VOCABULARY, (1, sum(tree.slots)))
    weight = torch.randn(len(apart.tokens), VOCABULARY)
    found = []
    for of_model, params, kept in (
        (tokens, tree.params, apart.tokens),
        (tokens[:, apart.source], thd(apart.documents.lengths), apart.kept),
    ):
        model.zero_grad()
        out = logits(model, of_model, params)[kept]
        (out * weight).sum().backward()
        found.append(
            {"logits": out.detach()} | {n: p.grad for n, p in model.named_parameters()}
        )
    assert calls == ["TorchAttention", "TEDotProductAttention"]
    for name, value in found[0].items():
        assert_close(name, value, found[1][name], 1e-4)


def test_packed_documents_and_batches_run_as_before():
    """The same bits and the same keys of a checkpoint as with Megatron's own attention
    layers."""
    ours = build()
    theirs = hybrid(upstream)
    assert isinstance(attention_of(ours), TorchSelfAttention)
    assert type(attention_of(theirs)) is SelfAttention
    assert ours.sharded_state_dict().keys() == theirs.sharded_state_dict().keys()
    mine = attention_of(ours)
    upstreams = attention_of(theirs)
    mine.load_state_dict(upstreams.state_dict())
    x = torch.randn(TOKENS, 1, ours.config.hidden_size)
    angles = ours.rotary_pos_emb(TOKENS)
    for params in (None, thd((5, TOKENS - 5))):
        given = {"rotary_pos_emb": angles, "packed_seq_params": params}
        assert torch.equal(mine(x, None, **given)[0], upstreams(x, None, **given)[0])


def test_a_tree_without_branches_gives_packed_documents_to_torch(calls):
    model = build()
    tokens = torch.randint(VOCABULARY, (1, TOKENS))
    lengths = (5, TOKENS - 5)
    by_torch = logits(
        model, tokens, tree_packed_seq_params(lengths, (-1, -1), device="cpu")
    )
    assert calls == ["TorchAttention"]
    assert_close("logits", by_torch, logits(model, tokens, thd(lengths)), 1e-4)
    assert calls == ["TorchAttention", "TEDotProductAttention"]
