"""generate() and check_generation() with a stand-in for the model, whose logits are
given: every result follows from these."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_gdn.inference.generate import generate
from megatron_gdn.testing import check_generation

STOP = 1


class Given(nn.Module):
    """A model with ``trained [B, S, V]`` as the logits of the training forward and
    ``generated`` as those under an inference context."""

    def __init__(self, trained, generated):
        super().__init__()
        self.config = SimpleNamespace(
            pipeline_model_parallel_size=1,
            context_parallel_size=1,
            batch_invariant_mode=False,
        )
        self.trained = trained
        self.generated = generated

    def forward(self, tokens, positions, _, inference_context=None, **__):
        logits = self.trained if inference_context is None else self.generated
        return logits[torch.arange(len(tokens))[:, None], positions]


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ([[2, 1, 2, 2, 2], [2, 2, 2, 1, 2]], 4),  # the first row stopped before
        ([[1, 2, 2, 2, 2], [2, 1, 2, 2, 2], [2, 2, 1, 1, 1]], 3),
        ([[2, 1, 2, 2, 2], [2, 1, 1, 1, 1]], 2),
        ([[1, 2, 2, 2, 2], [1, 2, 2, 2, 2]], 1),
        ([[1, 1, 1, 1, 1], [2, 2, 2, 2, 2]], 5),  # one that never stops
        ([[2, 2, 2, 2, 1]], 5),
    ],
)
@pytest.mark.parametrize("chunk", [None, 2])
def test_generation_ends_with_the_row_that_stops_last(rows, columns, chunk):
    """A stop within the prompt ends no row."""
    made = torch.tensor(rows)
    prompt = torch.full((len(rows), 3), STOP)
    chosen = torch.cat([prompt[:, 1:], made], dim=1)  # after each position
    model = Given(None, nn.functional.one_hot(chosen, 3))
    whole = torch.cat([prompt, made], dim=1)
    found = generate(model, prompt, 5, stop=STOP, chunk=chunk)
    assert torch.equal(found, whole[:, : 3 + columns])
    assert torch.equal(generate(model, prompt, 5, chunk=chunk), whole)


@pytest.mark.parametrize(("prompt", "at_once"), [(1, 1), (4, 2), (7, 3), (8, 1)])
def test_a_gap_of_generation_is_that_of_the_probabilities(prompt, at_once):
    """With log-probabilities up to some 10 in fp32, each within a few roundings of
    10."""
    B, S, V = 3, 9, 7
    trained, generated = 2 * torch.randn(2, B, S, V)
    text = torch.randint(V, (B, S))
    found = check_generation(
        Given(trained, generated), text, prompt=prompt, at_once=at_once
    )
    gaps, divergences = [], []
    for b in range(B):
        for s in range(prompt - 1, S):
            p, q = (x[b, s].double().softmax(0) for x in (trained, generated))
            divergences.append((p * (p / q).log()).sum().item())
            if s + 1 < S:
                predicted = text[b, s + 1]
                gaps.append((p[predicted] / q[predicted]).log().abs().item())
    expected = {
        "max_log_prob": max(gaps),
        "mean_log_prob": sum(gaps) / len(gaps),
        "mean_kl": sum(divergences) / len(divergences),
        "max_kl": max(divergences),
    }
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, abs=10 * 10 * 2**-23), name
    assert not found.equal and found.backend is None


@pytest.mark.parametrize(("position", "equal"), [(3, True), (4, False), (8, False)])
def test_one_changed_logit_after_the_prompt_is_a_gap(position, equal):
    """The last token of the prompt predicts the first token after it."""
    trained = torch.randn(2, 9, 7)
    generated = trained.clone()
    generated[1, position, 5] += 1
    text = torch.randint(7, (2, 9))
    found = check_generation(Given(trained, generated), text, prompt=5)
    assert found.equal is equal and (found.max_kl == 0) is equal
