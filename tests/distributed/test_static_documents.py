"""Documents in fixed buffers, for CUDA graphs: bits of ordinary ones, and nothing read on the host.

The plain rule on the CPU; ``tests/gpu/test_graphs.py`` has the GPU rules and the graphs themselves.
"""

import pytest
import torch

from megatron_gdn import Documents
from tests.distributed import static_laws as laws
from tests.host_reads import HostRead, no_host_reads

BF16 = {"bf16": True, "params_dtype": torch.bfloat16}


def nightly(*values, id=None):
    return pytest.param(*values, marks=pytest.mark.nightly, id=id)


def test_a_host_read_is_seen():
    """What the laws below rely on: ordinary documents are read from their tensor."""
    offsets = torch.tensor([0, 3, 8])
    with pytest.raises(HostRead, match="tolist"), no_host_reads():
        Documents.from_cu_seqlens(offsets, 8)
    with pytest.raises(HostRead, match="local_scalar"), no_host_reads():
        torch.ops.aten._local_scalar_dense(offsets[0])
    with pytest.raises(HostRead, match="repeat_interleave"), no_host_reads():
        offsets.repeat_interleave(offsets)


@pytest.mark.parametrize("changes", [{}, nightly(BF16, id="bf16")], ids=["fp32", "bf16"])
def test_ten_sets_of_documents_in_one_set_of_buffers(pools, changes):
    pools(1).run(laws.buffers_equal_ordinary_documents, **changes)


@pytest.mark.parametrize("layout", ["zigzag", nightly("zigzag_buffer"), nightly("contiguous")])
def test_ten_sets_of_documents_with_their_heads_on_two_ranks(pools, layout):
    options = {"linear_cp_mode": "headwise"}
    pools(2).run(laws.buffers_equal_ordinary_documents, 2, layout, options=options)


def test_ten_sets_of_documents_with_their_heads_on_four_ranks(pools):
    options = {"linear_cp_mode": "headwise"}
    pools(4).run(laws.buffers_equal_ordinary_documents, 4, options=options)


@pytest.mark.parametrize(("cp", "mode"), [(1, None), (2, "headwise"), (2, "chunkwise")])
def test_a_layer_in_megatrons_graphs_reads_the_buffers(pools, cp, mode):
    pools(cp).run(laws.a_layer_in_megatrons_graphs_reads_the_buffers, cp, linear_cp_mode=mode)


@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
def test_a_number_that_is_not_finite_stays_in_its_document(pools, mode):
    run = laws.a_number_that_is_not_finite_stays_in_its_document
    pools(2).run(run, 2, linear_cp_mode=mode)


@pytest.mark.parametrize("cp", [2, 4])
def test_ten_sets_of_documents_with_their_states_on_several_ranks(pools, cp):
    options = {"linear_cp_mode": "chunkwise"}
    pools(cp).run(laws.buffers_equal_ordinary_documents, cp, options=options)


def test_chunkwise_takes_buffers_in_zigzag_alone_and_auto_takes_headwise(pools):
    pools(2).run(laws.chunkwise_takes_buffers_in_zigzag_alone)
