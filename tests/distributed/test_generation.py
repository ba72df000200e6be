"""Hybrid models (M, G and *) generate: through Megatron's own engine, and at every
parallel size.

fp32, 1e-5 of the largest logit: some 80 units of rounding for sums of a few hundred
terms.
"""

import os
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.engines import StaticInferenceEngine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron.core.inference.utils import InferenceMode
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import build_module

from megatron_gdn.inference import roll_back
from megatron_gdn.inference.generate import (
    generate,
    next_logits,
    ready_for_single_tokens,
    static_context,
)
from megatron_gdn.specs import gated_delta_net_spec, hybrid_stack_spec, mamba2_spec
from megatron_gdn.testing import RowByRow, check_generation
from tests.distributed.layer_laws import thd
from tests.parallel import hybrid_model, make_config, model_config, parallel
from tests.ranks import on_ranks

VOCAB = 32
LONGEST = 64


class Letters:
    """A tokenizer, as far as Megatron's engine asks one."""

    eod = 0
    bos = 0
    vocab_size = VOCAB

    def tokenize(self, text):
        return [ord(letter) % (VOCAB - 1) + 1 for letter in text]

    def detokenize(self, tokens, **_):
        return "".join(chr(64 + int(token)) for token in tokens)


def forget_attention_backend() -> None:
    """A model leaves its own in the environment, and refuses that of another."""
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)


def build_model(pattern="M-*-G-", positions="rope", **changes):
    forget_attention_backend()
    mamba = {
        "mamba_num_heads": 6,
        "mamba_num_groups": 2,
        "mamba_head_dim": 4,
        "mamba_state_dim": 5,
    }
    sizes = {
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "num_query_groups": 2,
        **mamba,
    }
    if "*" not in pattern:
        positions = "none"
    config = model_config(pattern, kv_channels=6, **sizes, **changes)
    model = hybrid_model(config, pattern, position_embedding_type=positions)
    forget_attention_backend()
    return model.eval()


@torch.no_grad()
def training_logits(model, tokens):
    """``[B, S, V]`` of tokens ``[B, S]`` by the training forward on one rank."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return model(tokens, positions, None, runtime_gather_output=True)


def generates(
    tp=1, cp=1, sp=False, pattern="M-*-G-", positions="rope"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens, and the logits of chunks, steps and a roll-back over a text."""
    with parallel(tp=tp, cp=cp):
        sizes = {"tensor_model_parallel_size": tp, "context_parallel_size": cp}
        model = build_model(pattern, positions, **sizes, sequence_parallel=sp)
        text = torch.randint(VOCAB, (2, 23), generator=torch.Generator().manual_seed(1))
        model.train()
        attention = [m for m in model.modules() if isinstance(m, DotProductAttention)]
        groups = [core.pg_collection.cp for core in attention]
        greedy = generate(model, text[:, :9], 10, chunk=4)
        assert [core.pg_collection.cp for core in attention] == groups
        assert model.training and model.config.sequence_parallel is sp
        assert all(module.training for module in model.modules())
        model.eval()
        context = static_context(model, 2, 40)
        found = []
        at = 0
        with torch.inference_mode(), ready_for_single_tokens(model):
            for count in (9, 1, 5, 2, 6):
                if at == 15:  # tokens that are not accepted
                    next_logits(model, text[:, 3:7], context)
                    roll_back(context, 0)
                found.append(next_logits(model, text[:, at : at + count], context))
                at += count
        logits = torch.cat(found, dim=1).clone()
        if tp == cp == 1:
            torch.testing.assert_close(
                logits,
                training_logits(model, text),
                rtol=1e-5,
                atol=1e-5 * logits.abs().max(),
            )
            assert torch.equal(
                training_logits(model, greedy)[:, 8:-1].argmax(-1), greedy[:, 9:]
            )
        return greedy, logits


def gap(
    tp=1, exact=False, pattern="M-*-G-", at_once=1, dtype=torch.float32, greedy=False
):
    """How far generation is from training in 67 tokens, drawn or ``greedy``, past a
    step of 64."""
    changes = {"params_dtype": dtype, "bf16": dtype == torch.bfloat16}
    changes["batch_invariant_mode"] = exact
    with parallel(tp=tp):
        model = build_model(pattern, tensor_model_parallel_size=tp, **changes)
        text = torch.randint(VOCAB, (2, 67), generator=torch.Generator().manual_seed(1))
        if greedy:
            with RowByRow() if exact else nullcontext():
                text = generate(model, text[:, :61], 6)
        return check_generation(model, text, prompt=61, at_once=at_once)


def require_no_gap(found) -> None:
    assert found.equal and found.max_log_prob == found.max_kl == 0, found


@pytest.fixture(scope="module")
def alone(pools):
    (found,) = pools(1).run(generates)
    return found


@on_ranks(cp=1)
def test_megatrons_own_engine_generates_what_training_calls_likeliest():
    model = build_model()
    wrapped = GPTInferenceWrapper(model, StaticInferenceContext(3, LONGEST))
    engine = StaticInferenceEngine(
        TextGenerationController(wrapped, Letters()), legacy=True
    )
    prompts = ["an early word", "two", "a third one"]
    wanted = SamplingParams(top_k=1, num_tokens_to_generate=12, return_log_probs=True)
    wanted.add_attributes({"no_early_termination": True})
    try:
        requests = engine.generate(prompts=prompts, sampling_params=wanted)
    finally:
        InferenceMode.unset_active()
    for prompt, request in zip(prompts, requests, strict=True):
        given = Letters().tokenize(prompt)
        made = request.generated_tokens.tolist()
        assert len(made) == 12
        logits = training_logits(model, torch.tensor([given + made]))[0]
        assert logits[len(given) - 1 : -1].argmax(-1).tolist() == made
        expected = logits.log_softmax(-1)[
            torch.arange(len(given) - 1, len(given) + 11), made
        ]
        found = torch.tensor(request.generated_log_probs)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_model_of_recurrent_layers_alone_generates(pools):
    pools(1).run(generates, pattern="M-G-")


@pytest.mark.parametrize(
    ("tp", "cp", "sp"),
    [
        pytest.param(2, 1, False, marks=pytest.mark.slow),
        (2, 1, True),
        (1, 2, False),
    ],
    ids=["tp2", "sp2", "cp2"],
)
def test_two_ranks_generate_what_one_generates(pools, alone, tp, cp, sp):
    tokens, logits = alone
    for other_tokens, other_logits in pools(2).run(generates, tp, cp, sp):
        assert torch.equal(other_tokens, tokens)
        torch.testing.assert_close(
            other_logits, logits, rtol=1e-5, atol=1e-5 * logits.abs().max().item()
        )


def test_attention_without_positions_generates_over_two_ranks(pools):
    given = {"pattern": "*-G-", "positions": "none"}
    ((tokens, logits),) = pools(1).run(generates, **given)
    for other_tokens, other_logits in pools(2).run(generates, cp=2, **given):
        assert torch.equal(other_tokens, tokens)
        torch.testing.assert_close(
            other_logits, logits, rtol=1e-5, atol=1e-5 * logits.abs().max().item()
        )


@on_ranks(tp=2)
def test_sequence_parallel_prefill_leaves_the_same_states():
    """A layer's states do not depend on how the rows of a prefill were cut."""
    model = build_model("M-G-", tensor_model_parallel_size=2, sequence_parallel=True)
    text = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    whole = static_context(model, 2, 20)
    cut = static_context(model, 2, 20)
    with torch.inference_mode():
        logits = next_logits(model, text, cut)
        steps = next_logits(model, text[:, :2], cut)  # two tokens, one on each rank
        with ready_for_single_tokens(model):
            torch.testing.assert_close(logits, next_logits(model, text, whole))
            torch.testing.assert_close(steps, next_logits(model, text[:, :2], whole))


@pytest.mark.parametrize("pattern", ["G-", "*-"])
@on_ranks(cp=2)
def test_layers_of_either_kind_refuse_a_cut_sequence_themselves(pattern):
    """In a model where no layer of the other kind refuses before them."""
    config = model_config(pattern, context_parallel_size=2)
    model = hybrid_model(config, pattern, hybrid_stack_spec("local"))
    text = torch.zeros(1, 4, dtype=torch.int64)
    refused = pytest.raises(
        NotImplementedError, match="generation runs on whole sequences"
    )
    with torch.inference_mode(), refused:
        next_logits(model, text, StaticInferenceContext(1, 8))


@on_ranks(cp=2)
def test_what_cannot_generate_is_refused_in_words():
    model = build_model(context_parallel_size=2)
    text = torch.zeros(1, 4, dtype=torch.int64)
    refused = partial(pytest.raises, (NotImplementedError, ValueError))
    with torch.inference_mode():
        with refused(match="static_context"):
            next_logits(model, text, StaticInferenceContext(1, 8))
        for tokens in (text[0], text[:, :0]):
            with refused(match=r"tokens \[B, S\]"):
                generate(model, tokens, 3)
    for asked in ({"prompt": 0}, {"prompt": 4}, {"at_once": 0}):
        with refused(match="prompt=.* and at_once=.* of 4 tokens leave nothing"):
            check_generation(model, text, **asked)
    with refused(match="in a model with context_parallel_size=1"):
        check_generation(model, text)
    (attention,) = (each for each in model.modules() if isinstance(each, Attention))
    attention.core_attention = DotProductAttention(
        make_config(), 1, AttnMaskType.causal, "self"
    )
    with refused(match="SelfAttention cannot run .* context_parallel_size=2"):
        static_context(model, 1, 8)
    model.config.pipeline_model_parallel_size = 2
    with refused(match="pipeline_model_parallel_size=2"):
        static_context(model, 1, 8)


@on_ranks(cp=1)
def test_generation_ends_where_every_row_has_the_stop_token_after_its_prompt():
    """And a caller's inference mode goes on."""
    model = build_model("M-")
    steps = torch.tensor([[7, 5], [7, 5], [5, 6], [7, 5]])
    picked = iter(steps)
    prompt = torch.full((2, 3), 5)
    with InferenceMode.active():
        found = generate(model, prompt, 4, pick=lambda logits: next(picked), stop=5)
        assert InferenceMode.is_active()
    assert torch.equal(found, torch.cat([prompt, steps[:3].T], 1))


def test_row_by_row_functions_have_their_values():
    x = torch.randn(3, 4)
    weight = torch.randn(4, 5)
    for function, *arguments in (
        (torch.mm, x, weight),
        (torch.addmm, torch.randn(5), x, weight),
        (torch.addmm, torch.randn(3, 5), x, weight),
        (torch.softmax, x, 0),
        (torch.log_softmax, x, 1),
        (torch.sigmoid, x),
        (torch.sigmoid, x[0]),
    ):
        with RowByRow():
            found = function(*arguments)
        torch.testing.assert_close(found, function(*arguments))


def test_generation_has_the_log_probabilities_of_training(pools):
    """In fp32 within some roundings of log-probabilities of up to 10."""
    (found,) = pools(1).run(gap)
    assert found.backend == "reference"
    assert 0 < found.max_log_prob < 1e-4 and found.mean_log_prob <= found.max_log_prob
    assert abs(found.max_kl) < 1e-6 and not found.equal


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("tp", "dtype", "at_once", "pattern", "greedy"),
    [
        pytest.param(1, torch.float32, 1, "M-*-G-", True, marks=pytest.mark.slow),
        (1, torch.float32, 1, "G-G-M-*-", False),
        pytest.param(2, torch.bfloat16, 4, "M-*-G-", False, marks=pytest.mark.nightly),
        pytest.param(2, torch.bfloat16, 4, "M-*-G-", True, marks=pytest.mark.slow),
    ],
    ids=["greedy", "drawn", "tp2-bf16-drawn", "tp2-bf16-greedy"],
)
@on_ranks("tp")
def test_in_batch_invariant_mode_generation_has_the_bits_of_training(
    tp, dtype, at_once, pattern, greedy
):
    require_no_gap(gap(tp, True, pattern, at_once, dtype, greedy))


@on_ranks(tp=2)
def test_generation_has_the_bits_of_training_where_ranks_share_a_bf16_vocabulary():
    bf16 = {"params_dtype": torch.bfloat16, "bf16": True}
    sizes = {"tensor_model_parallel_size": 2, "batch_invariant_mode": True}
    model = build_model("G-", **sizes, **bf16)
    text = torch.randint(VOCAB, (1, 9), generator=torch.Generator().manual_seed(1))
    require_no_gap(check_generation(model, text, prompt=5))


@pytest.mark.parametrize(
    ("pattern", "tokens"),
    [
        pytest.param("G-*-", 700, marks=pytest.mark.slow),
        pytest.param("G-*-", 4096, marks=pytest.mark.nightly),
        pytest.param("M-G-", 4096, marks=pytest.mark.nightly),
    ],
)
@on_ranks(cp=1)
def test_in_batch_invariant_mode_many_tokens_have_the_bits_of_training(pattern, tokens):
    """Of drawn tokens in steps of 397 and, the last 70, of 1; then of greedy ones."""
    model = build_model(pattern, batch_invariant_mode=True)
    text = torch.randint(VOCAB, (1, tokens), generator=torch.Generator().manual_seed(1))
    with RowByRow():
        greedy = generate(model, text[:, :-70], 70)
    require_no_gap(check_generation(model, text, prompt=61, at_once=397))
    require_no_gap(check_generation(model, text, prompt=tokens - 70))
    require_no_gap(check_generation(model, greedy, prompt=tokens - 70))


@pytest.mark.slow
@on_ranks(1)
def test_in_batch_invariant_mode_packing_changes_no_bit():
    """A packed document has the bits of the document alone, in training and in
    generation."""
    with parallel(), RowByRow():
        for pattern in ("M-*-G-", "G-G-M-"):
            model = build_model(pattern, batch_invariant_mode=True)
            lengths = (30, 0, 70, 5)
            text = torch.randint(
                VOCAB, (1, 105), generator=torch.Generator().manual_seed(1)
            )
            pieces = text.split(lengths, dim=1)
            positions = torch.cat([torch.arange(n) for n in lengths])[None]
            with torch.no_grad():
                together = model(
                    text,
                    positions,
                    None,
                    packed_seq_params=thd(lengths),
                    runtime_gather_output=True,
                )
                for piece, packed in zip(
                    pieces, together.split(lengths, dim=1), strict=True
                ):
                    if piece.numel():
                        assert torch.equal(training_logits(model, piece), packed)
            with torch.inference_mode():
                context = static_context(model, 1, 70)
                parts = [next_logits(model, x, context) for x in pieces[2].split(33, 1)]
            assert torch.equal(torch.cat(parts, 1), together[:, 30:100])


@on_ranks(cp=1)
def test_kernels_are_refused_in_batch_invariant_mode():
    config = make_config(
        attention_dropout=0.0, mamba_num_heads=8, batch_invariant_mode=True
    )
    for make, more in ((gated_delta_net_spec, {}), (mamba2_spec, {"d_model": 24})):
        with pytest.raises(ValueError, match="Use 'auto' or 'reference'"):
            build_module(make("local", backend="fla"), config, layer_number=1, **more)
