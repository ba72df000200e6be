"""CUDA graphs of the layer on one GPU: a replay has the bits of the eager step."""

import pytest
import torch

from megatron_gdn import set_documents, static_packed_seq_params
from tests.gpu import graph_laws as laws
from tests.host_reads import waiting_refused
from tests.parallel import group_of_one, parallel

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nccl")]

OPTIONS = {
    "plain": {},
    "deterministic": {"deterministic_mode": True},
    "recompute": {"options": {"recompute": "light"}},
    "recompute all": {"options": {"recompute": "full"}},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_batch(name):
    laws.a_dense_graph_replays_eager_bits(**OPTIONS[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_ten_sets_of_documents_in_one_graph(name):
    laws.a_packed_graph_replays_eager_bits(
        as_ordinary=name == "deterministic", **OPTIONS[name]
    )


def test_boundaries_filled_inside_the_graph():
    laws.boundaries_can_be_filled_in_the_graph()


@pytest.mark.parametrize("backend", ["fla", "reference"])
def test_other_backends(backend):
    sets = laws.SETS[::3]
    options = {"backend": backend}
    laws.a_dense_graph_replays_eager_bits(options=options)
    laws.a_packed_graph_replays_eager_bits(as_ordinary=True, options=options, sets=sets)


def test_documents_of_one_token_and_more_than_fit():
    lengths = (1,) * 11 + (laws.TOKENS - 11,)
    laws.a_packed_graph_replays_eager_bits(
        as_ordinary=True, sets=[lengths, (laws.TOKENS,)], deterministic_mode=True
    )
    packed = static_packed_seq_params(64, 2)
    with pytest.raises(ValueError, match="max_documents=2"):
        set_documents(packed, laws.offsets_of((16, 16, 32)))


def test_the_host_waits_for_nothing():
    with parallel():
        step = laws.Step(laws.TOKENS, 1, 1, group_of_one())
        packed = static_packed_seq_params(laws.TOKENS, laws.MOST)
        offsets = [laws.offsets_of(lengths) for lengths in laws.SETS]
        step.run(packed)
        with waiting_refused():
            for one in offsets:
                set_documents(packed, one)
                step.run(packed)


def test_a_first_run_inside_a_capture_says_so():
    with parallel():
        step = laws.Step(laws.TOKENS, 1, 1, group_of_one())
        step.run(static_packed_seq_params(laws.TOKENS, laws.MOST))  # compiles
        packed = static_packed_seq_params(laws.TOKENS, laws.MOST)
        torch.cuda.synchronize()
        with (
            pytest.raises(
                RuntimeError, match="Run the forward and the backward once before"
            ),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            step.run(packed)


@pytest.mark.parametrize(
    "packed", [False, True], ids=["batch", "ten sets of documents"]
)
@pytest.mark.parametrize("modules", [(), ("attn",)], ids=["whole layer", "attn"])
def test_megatrons_local_graphs(modules, packed):
    laws.megatrons_local_graphs_give_eager_bits(modules, packed=packed)


@pytest.mark.parametrize("modules", [(), ("attn",)], ids=["whole layer", "attn"])
def test_transformer_engines_graphs(modules):
    pytest.importorskip("transformer_engine")
    laws.transformer_engines_graph_gives_eager_bits(modules)
