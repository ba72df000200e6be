"""What Megatron's CUDA graphs of layers ask of the layer, as far as a CPU shows it."""

from unittest.mock import patch

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import random
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.attention import SelfAttention

from megatron_gdn import (
    GatedDeltaNet,
    leave_attention_out_of_graphs,
    set_documents,
    static_packed_seq_params,
)
from megatron_gdn.mixers.packing import static_documents_of
from megatron_gdn.ops.host_tables import to_device
from tests.distributed.layer_laws import build_layer, thd, transformer_layer
from tests.distributed.mixers import whole
from tests.graphs_on_cpu import (
    captured_arguments,
    capturing_by_megatron,
    graphs_on_cpu,
    mismatches,
)
from tests.parallel import hybrid_model, in_ddp, make_config, model_config
from tests.ranks import on_ranks

one_rank = pytest.mark.usefixtures("one_rank")
COVERED = [("local", []), ("local", ["attn"]), ("transformer_engine", ["attn", "mlp"])]
covered = pytest.mark.parametrize(("impl", "modules"), COVERED, ids=str)


def build(impl, modules, **later):
    config = make_config(cuda_graph_impl=impl, cuda_graph_modules=modules)
    vars(config).update(later)  # some Megatrons refuse these themselves
    return build_layer(config, None, {})


def test_no_buffer_for_a_mask_is_asked_for():
    assert GatedDeltaNet.uses_attention_mask is False


@pytest.mark.parametrize("cp", [1, 2])
@on_ranks(cp="cp")
def test_the_masks_that_a_capture_gets_are_accepted_there(cp):
    """That of a transformer layer, the same on every rank, and a buffer of zeros in its
    place."""
    graphs = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": []}
    around = transformer_layer(make_config(context_parallel_size=cp, **graphs))
    static = around.get_layer_static_inputs(16, 2)["attention_mask"]
    assert static.shape == (2, 1, 16 // cp, 16)
    x = torch.randn(16 // cp, 2, 24)
    layer = around.self_attention
    expected = layer(x, None)[0]
    zeros = torch.zeros_like(static)  # the buffer that graphs of the mixer alone have
    with capturing_by_megatron():
        for mask in (static, zeros):
            assert torch.equal(layer(x, mask)[0], expected)
    if cp == 1:  # an ordinary causal mask
        assert torch.equal(layer(x, static)[0], expected)
    # the zigzag positions of no rank
    for mask in (zeros,) if cp == 1 else (zeros, static):
        with pytest.raises(NotImplementedError, match="is not a causal mask"):
            layer(x, mask)


@one_rank
@covered
def test_packed_documents_that_a_graph_of_the_layer_cannot_follow_are_refused_at_once(
    impl, modules
):
    layer = build(impl, modules)
    x = torch.randn(12, 1, 24)
    refused = pytest.raises(
        NotImplementedError, match=f"cuda_graph_impl='{impl}'.*static_packed"
    )
    with refused:
        layer(x, None, packed_seq_params=thd((4, 8)))
    layer(x, None)


@one_rank
def test_transformer_engines_graphs_take_no_fixed_buffers():
    layer = build("transformer_engine", [])
    packed = static_packed_seq_params(12, 3, device="cpu")
    with pytest.raises(
        NotImplementedError, match="only tensors.*cuda_graph_impl='local'"
    ):
        layer(torch.randn(12, 1, 24), None, packed_seq_params=packed)


def test_megatron_replays_no_graph_for_documents_in_other_buffers():
    made = [
        {"packed_seq_params": static_packed_seq_params(12, 3, device="cpu")}
        for _ in range(2)
    ]
    assert mismatches(made[0], captured_arguments(made[0])) == []
    (error,) = mismatches(made[1], captured_arguments(made[0]))
    assert "packed_seq_params'].buffers.number" in error
    wider = {"packed_seq_params": static_packed_seq_params(12, 4, device="cpu")}
    assert any("Received shape" in error for error in mismatches(wider, made[0]))
    ordinary = {"packed_seq_params": thd((4, 4, 4))}
    with pytest.raises(AttributeError, match="buffers"):
        mismatches(ordinary, made[0])


@one_rank
def test_layers_with_attention_are_left_out_of_the_graphs():
    class Layer(torch.nn.Module):
        def __init__(self, mixer):
            super().__init__()
            self.self_attention, self.cudagraph_manager = mixer, torch.nn.Module()

    attention = object.__new__(SelfAttention)
    torch.nn.Module.__init__(attention)
    model = torch.nn.ModuleList([Layer(build("local", [])), Layer(attention)])
    assert leave_attention_out_of_graphs(model) == [model[1]]
    assert [hasattr(layer, "cudagraph_manager") for layer in model] == [True, False]
    assert leave_attention_out_of_graphs(model) == []


def test_graphs_without_a_gpu_are_refused_in_words():
    """``--cuda-graph-impl`` makes Megatron ask for such a generator before it builds a
    layer."""
    if torch.cuda.is_available():
        pytest.skip("has one")
    tracker = random.CudaRNGStatesTracker(use_cudagraphable_rng=True)
    with pytest.raises(RuntimeError, match="Leave --cuda-graph-impl out"):
        tracker.add("dropout", 1)


@one_rank
def test_a_model_trains_on_packed_documents_in_megatrons_graphs():
    """Megatron records the first step and replays the others; documents change in every
    step."""
    sets = ((5, 11), (16,), (1, 2, 0, 13), (4, 4, 4, 4))

    def build(graphs: str) -> DistributedDataParallel:
        config = model_config("G-*G-", cuda_graph_impl=graphs)
        return in_ddp(hybrid_model(config, "G-*G-", position_embedding_type="rope"))

    def step(model, tokens, packed) -> dict[str, torch.Tensor]:
        model.zero_grad_buffer()
        positions = torch.arange(16)[None]
        loss = model(
            tokens[:, :-1],
            positions,
            None,
            labels=tokens[:, 1:],
            packed_seq_params=packed,
        )
        loss.sum().backward()
        grads = {name: p.main_grad.clone() for name, p in model.named_parameters()}
        return {"loss": loss.detach().clone(), **grads}

    with graphs_on_cpu():
        eager = build("none")
        graphed = build("local")
        graphed.load_state_dict(eager.state_dict())
        (attention,) = leave_attention_out_of_graphs(graphed)
        assert isinstance(attention.self_attention, SelfAttention)
        both = [static_packed_seq_params(16, 4, device="cpu") for _ in range(2)]
        for lengths in sets:
            tokens = torch.randint(32, (1, 17))
            for packed in both:
                set_documents(packed, [0, *torch.tensor(lengths).cumsum(0).tolist()])
            found = step(graphed, tokens, both[0])
            expected = step(eager, tokens, both[1])
            for name, value in expected.items():
                assert torch.equal(found[name], value), (lengths, name)
            cuda_graphs.create_cudagraphs()
            assert cuda_graphs._CudagraphGlobalRecord.cudagraph_created
        with pytest.raises(AssertionError, match="no matching cudagraph"):
            step(graphed, tokens, both[1])


@one_rank
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_a_graph_that_the_config_asks_for_later_takes_no_packed_documents_either(kind):
    layer = whole(kind)
    x = torch.randn(12, 1, layer.config.hidden_size)
    layer(x, None, packed_seq_params=thd((4, 8)))
    layer.config.cuda_graph_impl = "local"
    with pytest.raises(
        NotImplementedError, match="boundaries of the first micro-batch"
    ):
        layer(x, None, packed_seq_params=thd((4, 8)))


@one_rank
def test_packed_documents_beside_graphs_of_other_modules_are_not():
    layer = build("local", ["mlp"])
    layer(torch.randn(12, 1, 24), None, packed_seq_params=thd((4, 8)))


@one_rank
@covered
@pytest.mark.parametrize(
    "field", ["hybrid_context_parallel", "dynamic_context_parallel"]
)
def test_micro_batches_with_ranks_of_their_own_are_refused_when_the_layer_is_built(
    impl, modules, field
):
    with pytest.raises(ValueError, match=f"{field} packs documents"):
        build(impl, modules, **{field: True})
    for not_captured in (("none", []), ("full_iteration", []), ("local", ["mlp"])):
        build(*not_captured, **{field: True})


@pytest.mark.parametrize(
    "make",
    [
        lambda documents: documents.position_T,
        lambda documents: documents.on_host(),
        lambda _: to_device(torch.zeros(1), "cuda"),
    ],
    ids=["of the buffers", "of their boundaries on the host", "from the host"],
)
def test_a_table_is_not_made_while_a_graph_is_captured(make):
    documents = static_documents_of(static_packed_seq_params(12, 3, device="cpu"))
    with (
        patch("torch.cuda.is_initialized", lambda: True),
        patch("torch.cuda.is_current_stream_capturing", lambda: True),
        pytest.raises(
            RuntimeError, match="Run the forward and the backward once before"
        ),
    ):
        make(documents)


@one_rank
def test_buffers_that_do_not_fit_are_refused():
    packed = static_packed_seq_params(12, 3, device="cpu")
    for offsets, said in (
        ([0, 3, 6, 9, 12], "has 4 documents.*max_documents=3"),
        ([0, 3, 11], "ends at 11.*12 tokens"),
        ([0, 8, 4, 12], "runs backwards"),
        (torch.tensor([1, 12]), "starts at 1"),
    ):
        with pytest.raises(ValueError, match=said):
            set_documents(packed, offsets)
    assert packed.cu_seqlens_q.tolist() == [0, 12, 12, 12]
    short = static_packed_seq_params(12, 3, max_seqlen=8, device="cpu")
    assert short.cu_seqlens_q.tolist() == [0, 8, 12, 12] and short.max_seqlen_q == 8
    set_documents(short, [0, 4, 12])
    with pytest.raises(ValueError, match="a document of 9 tokens.*for 8 at most"):
        set_documents(short, [0, 3, 12])
    with pytest.raises(TypeError, match="static_packed_seq_params"):
        set_documents(thd((4, 8)), [0, 12])
    layer = build_layer(make_config(), None, {})
    with pytest.raises(
        ValueError, match="fixed buffers for 12 tokens on cpu.*16 tokens"
    ):
        layer(torch.randn(16, 1, 24), None, packed_seq_params=packed)
    with pytest.raises(ValueError, match="must be at least 1"):
        static_packed_seq_params(12, 0, device="cpu")
    with pytest.raises(ValueError, match="3 documents of at most 3 tokens cannot fill"):
        static_packed_seq_params(12, 3, max_seqlen=3, device="cpu")


@one_rank
def test_what_the_host_has_to_know_is_refused():
    packed = static_packed_seq_params(12, 3, device="cpu")
    with pytest.raises(NotImplementedError, match="are on the device alone"):
        _ = static_documents_of(packed).lengths
    layer = build_layer(make_config(batch_invariant_mode=True), None, {})
    with pytest.raises(NotImplementedError, match="without batch_invariant_mode"):
        layer(torch.randn(12, 1, 24), None, packed_seq_params=packed)


def test_offsets_on_the_device_are_checked_there():
    documents = static_documents_of(static_packed_seq_params(12, 3, device="cpu"))
    documents.boundaries.copy_(torch.tensor([0, 8, 4, 12]))
    with pytest.raises(RuntimeError, match="must start at 0, never decrease"):
        documents.refresh()
