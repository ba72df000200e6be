"""Our mixers in Megatron's own DynamicInferenceContext: requests come, decode, leave,
return.

The context runs as it is: its slots, buffers, padding and metadata. Only attention's
kernels, which no CPU has, are not called: the tests feed one recurrent layer.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from megatron.core.inference.batch_dimensions_utils import InferenceBatchDimensions
from megatron.core.inference.config import InferenceConfig, MambaInferenceStateConfig
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.mtp_utils_pytorch import (
    mamba_state_selective_copy,
)

from megatron_gdn.testing import RowByRow
from tests.distributed.layer_laws import thd
from tests.distributed.mixers import BY_NAME, FULL_GATES, whole
from tests.parallel import make_config

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
VOCAB = 50
KINDS = [*BY_NAME, "kda_full"]
ALIGNED = [f"{name} aligned" for name in KINDS]
ALL_KINDS = [*KINDS, *ALIGNED]


def with_aligned(*quick: str) -> list:
    """All kinds; quick tests have these of the aligned ones.

    Every aligned kind is in
    `test_requests_of_all_lengths_come_decode_and_leave`, whose steps these are.
    """
    chosen = [f"{name} aligned" for name in quick]
    others = [kind for kind in ALIGNED if kind not in chosen]
    slow = (pytest.param(kind, marks=pytest.mark.slow) for kind in others)
    return [*KINDS, *chosen, *slow]


def make_layer(kind, **options):
    name, *mode = kind.split()
    if name == "kda_full":
        layer = whole("kda", **FULL_GATES, **options)
    else:
        layer = whole(name, **options)
    layer.config.batch_invariant_mode = bool(mode)
    return layer.eval()


def make_context(layer, *, shapes=None, dtype=torch.float32, speculative=0, **more):
    """For a model of this layer and one of attention, as Megatron's engine makes it."""
    conv, states = shapes or layer.mamba_state_shapes_per_request()
    of_states = MambaInferenceStateConfig(
        layer_type_list=["M", "*"],
        conv_states_shape=conv,
        ssm_states_shape=states,
        conv_states_dtype=torch.float32,
        ssm_states_dtype=dtype,
        mamba_chunk_size=layer.chunk_size,
    )
    config = InferenceConfig(
        max_sequence_length=256,
        buffer_size_gb=0.01,
        paused_buffer_size_gb=0.001,
        block_size_tokens=16,
        max_requests=4,
        max_tokens=128,
        unified_memory_level=0,
        num_speculative_tokens=speculative,
        **{"mamba_inference_state_config": of_states, **more},
    )
    return DynamicInferenceContext(make_config(num_layers=2), config)


class Served:
    """A layer that is fed through a context, and what came out for every token of every
    request."""

    def __init__(self, layer, context) -> None:
        self.layer = layer
        self.context = context
        self.embedding = torch.randn(VOCAB, layer.config.hidden_size)
        self.fed: dict[int, list[int]] = {}
        self.found: dict[int, list[torch.Tensor]] = {}
        self._random = torch.Generator().manual_seed(1)
        # The linear layers of an aligned layer, see check_generation.
        self.by_row = RowByRow if layer.config.batch_invariant_mode else nullcontext

    def tokens(self, *shape):
        return torch.randint(VOCAB, shape, generator=self._random)

    def request(self, number: int, length: int) -> DynamicInferenceRequest:
        self.fed[number] = []
        self.found[number] = []
        return DynamicInferenceRequest(
            request_id=number,
            prompt_tokens=self.tokens(length),
            sampling_params=SamplingParams(
                num_tokens_to_generate=40, termination_id=-1
            ),
        )

    def step(self) -> list[int]:
        """One forward; the ids of its requests, in their order."""
        context = self.context
        context.initialize_attention_state()
        context.transfer_bookkeeping_to_gpu()
        ids = context.current_input_and_position_ids()[0][0].long()
        with torch.inference_mode(), self.by_row():
            out, _ = self.layer(self.embedding[ids][:, None], inference_context=context)
        assert len(out) == len(ids)
        requests = context.request_ids[: context.total_request_count].tolist()
        lengths = context.request_query_lengths[: context.total_request_count].tolist()
        start = 0
        for number, length in zip(requests, lengths, strict=True):
            self.fed[number] += ids[start : start + length].tolist()
            self.found[number] += out[start : start + length, 0]
            start += length
        assert not out[start:].any(), "padding"
        return requests

    def go_on(self, requests, *, without=()) -> None:
        """Every request gets a token of ours, or leaves."""
        stay = torch.tensor([int(number not in without) for number in requests])
        tokens = self.tokens(len(requests))
        more = ()
        if self.context.num_speculative_tokens:
            more = (self.tokens(self.context.num_speculative_tokens, len(requests)),)
        self.context.update_requests(stay, tokens, *more)

    def hold(self, *numbers) -> None:
        """What came out is what the layer gives for the whole sequences: to the bit if
        aligned."""
        for number in numbers:
            with torch.no_grad(), self.by_row():
                expected, _ = self.layer(
                    self.embedding[torch.tensor(self.fed[number])][:, None]
                )
            found = torch.stack(self.found[number])
            on_grid = self.layer.config.batch_invariant_mode
            assert not on_grid or torch.equal(found, expected[:, 0]), number
            bound = 1e-5 * expected.abs().max().item()
            torch.testing.assert_close(found, expected[:, 0], rtol=1e-5, atol=bound)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_requests_of_all_lengths_come_decode_and_leave(kind):
    layer = make_layer(kind)
    served = Served(layer, make_context(layer))
    context = served.context
    assert (
        context.mamba_conv_states.shape[2:] == layer.mamba_state_shapes_per_request()[0]
    )
    context.mamba_conv_states.fill_(1e30)  # what a slot held before is of no meaning
    context.mamba_ssm_states.fill_(7.0)
    for number, length in enumerate((62, 65, 1)):
        context.add_request(served.request(number, length))
    served.go_on(served.step())
    served.go_on(served.step())
    served.go_on(served.step(), without=[1])
    assert context.is_decode_only()
    # beside two that decode, in a slot that was used
    context.add_request(served.request(3, 9))
    context.add_request(served.request(4, 2))
    requests = served.step()
    assert sorted(requests) == [0, 2, 3, 4]
    assert (
        context.batch_dimensions.decode_req_count
        == context.batch_dimensions.prefill_req_count
    )
    served.go_on(requests)
    served.step()
    assert len(served.fed[0]) == 66 and len(served.fed[3]) == 10
    served.hold(0, 1, 2, 3, 4)


@pytest.mark.parametrize("kind", with_aligned("gdn", "gdp"))
def test_a_prompt_may_come_in_chunks(kind):
    layer = make_layer(kind)
    served = Served(layer, make_context(layer, enable_chunked_prefill=True))
    context = served.context
    context.add_request(served.request(0, 4))
    served.go_on(served.step())
    request = served.request(1, 50)
    for length in (20, 3, 27):
        last = length == request.remaining_prompt_length
        context.chunked_prefill_request_id = -1 if last else request.request_id
        context.add_request(request, prefill_chunk_length=length)
        request.remaining_prompt_tokens = request.remaining_prompt_tokens[length:]
        request.finished_chunk_token_count += length
        served.go_on(served.step())
    served.step()
    assert len(served.fed[1]) == 51 and len(served.fed[0]) == 4 + 4
    served.hold(0, 1)


@pytest.mark.parametrize("kind", with_aligned("kda", "mamba2"))
def test_speculated_tokens_can_be_taken_back(kind):
    """Megatron's own function takes the states back to the accepted tokens."""
    layer = make_layer(kind)
    served = Served(layer, make_context(layer, speculative=2))
    context = served.context
    context.add_request(served.request(0, 6))
    context.add_request(served.request(1, 62))
    served.go_on(served.step())
    served.step()
    assert [len(fed) for fed in served.fed.values()] == [9, 65]
    served.hold(0, 1)
    order = context.request_ids[:2].tolist()
    # beside the first, which is never taken back
    accepted = torch.tensor([2 * n for n in order])
    slots = context.mamba_metadata.request_to_mamba_state_idx[:2]
    for name in ("conv", "ssm"):
        mamba_state_selective_copy(
            getattr(context, f"mamba_intermediate_{name}_states"),
            getattr(context, f"mamba_{name}_states"),
            torch.zeros(2),
            slots,
            accepted,
            context.num_mamba_layers,
        )
    conv, states = context.mamba_states_cache(1)
    token = served.tokens(2)
    with torch.inference_mode(), served.by_row():
        rows = layer.project(served.embedding[token][:, None])
        mixed = layer.ssm_decode(rows, conv, states, slots)
        out = layer.out_proj(mixed.transpose(0, 1))[0]
    for place, number in enumerate(order):
        fed = served.fed[number]
        kept = fed[: len(fed) - 2 + accepted[place]]
        assert len(kept) == (7, 65)[number]
        served.fed[number] = [*kept, int(token[place])]
        served.found[number] = [*served.found[number][: len(kept)], out[0, place]]
    served.hold(0, 1)


@pytest.mark.parametrize("speculative", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_follow_the_requests_that_decode(kind, speculative):
    """Each with all its tokens. The step has room for more requests that decode, as the
    dimensions of a CUDA graph do, and the rows of this room are those of the prompts.
    """
    layer = make_layer(kind)
    served = Served(layer, make_context(layer, speculative=speculative))
    context = served.context
    context.add_request(served.request(0, 6))
    served.go_on(served.step())
    context.add_request(served.request(1, 9))
    context.add_request(served.request(2, 2))
    room = InferenceBatchDimensions(32, prefill_req_count=2, decode_req_count=2)
    context.cuda_graph_batch_dimensions_list = [room]
    served.go_on(served.step())
    assert context.padded_batch_dimensions.decode_req_count == 2
    assert context.batch_dimensions.decode_req_count == 1
    context.cuda_graph_batch_dimensions_list = []
    served.step()
    assert len(served.fed[1]) == 9 + 1 + speculative
    served.hold(0, 1, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_pipeline_stage_has_buffers_of_its_own_layers(kind):
    """Its first recurrent layer has the first of them, whatever its number."""
    layer = make_layer(kind, pp_layer_offset=3)
    layer.layer_number += 3
    served = Served(layer, make_context(layer))
    served.context.add_request(served.request(0, 5))
    served.go_on(served.step())
    served.step()
    served.hold(0)


def test_windows_hold_the_last_inputs_of_the_convolution():
    """All W of them, as Megatron's kernels keep them."""
    layer = make_layer("mamba2")
    served = Served(layer, make_context(layer))
    served.context.add_request(served.request(0, 2))
    served.go_on(served.step())
    served.step()
    conv, _ = served.context.mamba_states_cache(1)
    slot = int(served.context.mamba_metadata.request_to_mamba_state_idx[0])
    rows = layer.project(served.embedding[torch.tensor(served.fed[0])])
    expected = torch.zeros_like(conv[slot])
    expected[:, 1:] = rows[:, layer.layout.conv_columns].T
    torch.testing.assert_close(conv[slot], expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shapes": ((8, 4), (2, 3, 5))}, "holds conv of .* one kind and size"),
        (
            {"dtype": torch.bfloat16},
            "ssm_states_dtype=torch.float32.*--mamba-inference-ssm-states-dtype fp32",
        ),
        (
            {"enable_prefix_caching": True, "prefix_caching_mamba_gb": 0.01},
            "cached prefixes",
        ),
        (
            {"mamba_inference_state_config": None},
            "no buffers for recurrent states; give .* mamba_inference_state_config",
        ),
    ],
    ids=["another layer", "narrow states", "prefix caching", "no states"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_context_cannot_hold_is_refused_in_words(kind, change, words):
    layer = make_layer(kind)
    served = Served(layer, make_context(layer, **change))
    served.context.add_request(served.request(0, 3))
    with pytest.raises((ValueError, NotImplementedError), match=words):
        served.step()


@pytest.mark.parametrize("kind", KINDS)
def test_masks_and_packing_are_refused(kind):
    layer = make_layer(kind)
    context = make_context(layer)
    call = partial(
        layer, torch.zeros(4, 1, layer.config.hidden_size), inference_context=context
    )
    for given in ({"packed_seq_params": thd((4,))}, {"attention_mask": torch.ones(1)}):
        with (
            torch.inference_mode(),
            pytest.raises(NotImplementedError, match="holds the request"),
        ):
            call(**given)


@pytest.mark.parametrize(
    ("dtype", "flag"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")], ids=str
)
def test_the_flags_for_a_16_bit_layer_are_named(dtype, flag):
    layer = make_layer("gdn").to(dtype)
    served = Served(layer, make_context(layer, dtype=dtype))
    served.embedding = served.embedding.to(dtype)
    served.context.add_request(served.request(0, 3))
    said = f"-conv-states-dtype {flag} --mamba-inference-ssm-states-dtype fp32"
    with pytest.raises(ValueError, match=said):
        served.step()


def decode_buffers(layer, steps=()):
    """Of 3 slots; ``steps`` is the dimension of the tokens of a step."""
    window, state = layer.mamba_state_shapes_per_request()
    torch.manual_seed(5)
    return torch.randn(3, *steps, *window), torch.randn(3, *steps, *state)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_without_slots_request_n_has_slot_n(kind):
    layer = make_layer(kind)
    rows = layer.project(torch.randn(2, 1, layer.config.hidden_size)).detach()
    found = []
    for slots in (None, torch.arange(2)):
        buffers = decode_buffers(layer)
        found.append([layer.ssm_decode(rows, *buffers, slots), *buffers])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kind", KINDS)
def test_several_tokens_without_the_states_after_each_are_refused(kind):
    layer = make_layer(kind)
    rows = layer.project(torch.randn(2, 3, layer.config.hidden_size)).detach()
    conv_steps, _ = decode_buffers(layer, (3,))
    for steps in ((), (conv_steps, None)):
        with pytest.raises(ValueError, match="3 tokens .* num_speculative_tokens=2"):
            layer.ssm_decode(rows, *decode_buffers(layer), torch.arange(2), *steps)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_without_a_prompt_gives_zeros_and_changes_no_state(kind):
    """As in a CUDA graph for steps with prompts, replayed where none came."""
    layer = make_layer(kind)
    context = make_context(layer)
    assert context.mamba_metadata.cu_seqlens_list == [0]
    rows = layer.project(torch.randn(5, 1, layer.config.hidden_size)).detach()
    buffers = decode_buffers(layer)
    before = [x.clone() for x in buffers]
    assert not layer.ssm_prefill(rows, *buffers, context).any()
    assert all(map(torch.equal, buffers, before))
