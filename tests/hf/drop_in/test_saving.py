"""Files, caches and recomputation: what a patched model shares with an unpatched one."""

import pytest
import torch

from megatron_gdn.hf import gates_in_fp32, patch
from tests.hf.drop_in.conftest import DENSE, FAMILIES, GLM, KIMI, VISION, VISION_MOE
from tests.hf.drop_in.test_layer import bare
from tests.parallel import assert_close


def equal(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("family", [*FAMILIES, VISION, VISION_MOE, GLM])
def test_a_saved_model_loads_in_transformers_and_comes_back_bit_for_bit(fresh, family, tmp_path):
    model, source = fresh(family), fresh(family)
    patch(model)
    model.save_pretrained(tmp_path)
    theirs = type(source).from_pretrained(tmp_path, dtype=torch.float32)
    equal(theirs.state_dict(), source.state_dict())
    theirs.save_pretrained(tmp_path / "back")
    back = type(source).from_pretrained(tmp_path / "back", dtype=torch.float32)
    patch(back)
    equal(back.state_dict(), model.state_dict())
    model.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("family", [DENSE, KIMI])
def test_a_bf16_model_keeps_the_gates_of_its_file(fresh, tmp_path, family):
    source = fresh(family)
    source.save_pretrained(tmp_path)
    with gates_in_fp32():
        model = type(source).from_pretrained(tmp_path, dtype=torch.bfloat16)
    patch(model)
    held = {bare(name): p for name, p in model.named_parameters() if "_fp32_params" in name}
    file = dict(source.named_parameters())
    assert len(held) == 6 and all(torch.equal(p, file[name]) for name, p in held.items())
    rest = {p.dtype for name, p in model.named_parameters() if "_fp32_params" not in name}
    assert rest == {torch.bfloat16}
    rounded = type(source).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in rounded.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("unpacked", ["transformers", "fused"])
@pytest.mark.parametrize("family", [*FAMILIES, VISION, GLM])
def test_generation_is_that_of_the_unpatched_model(fresh, family, unpacked):
    ours, theirs = fresh(family), fresh(family)
    patch(ours, unpacked=unpacked)
    tokens = torch.randint(67, (2, 5))
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    settings = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    assert torch.equal(ours.generate(tokens, **settings), theirs.generate(tokens, **settings))


@pytest.mark.parametrize("family", [*FAMILIES, GLM])
def test_greedy_tokens_of_the_mixer_are_transformers(fresh, family):
    """Without a cache every token is the mixer's."""
    ours, theirs = fresh(family), fresh(family)
    patch(ours, unpacked="fused")
    tokens = torch.randint(1, 67, (2, 5))  # 0 is padding
    settings = {"max_new_tokens": 12, "do_sample": False, "use_cache": False, "pad_token_id": 0}
    assert torch.equal(ours.generate(tokens, **settings), theirs.generate(tokens, **settings))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_recomputes_with_the_same_boundaries(fresh, reentrant):
    """Two forwards before the backwards: what is recomputed belongs to its own batch."""
    plain, again = fresh(DENSE).train(), fresh(DENSE).train()
    for model in (plain, again):
        patch(model)
    again.gradient_checkpointing_enable({"use_reentrant": reentrant})
    again.enable_input_require_grads()
    tokens = torch.randint(67, (1, 8))
    boundaries = (
        torch.tensor([[1, 1, 1, 2, 2, 2, 2, 2]]),
        torch.tensor([[1, 2, 2, 2, 2, 2, 3, 3]]),
    )
    for model in (plain, again):
        losses = [
            model(tokens, labels=tokens, _packed_seq_ids=ids, use_cache=False).loss
            for ids in boundaries
        ]
        for loss in losses:
            loss.backward()
    for (name, one), other in zip(plain.named_parameters(), again.parameters(), strict=True):
        assert_close(name, other.grad, one.grad, 1e-6)
