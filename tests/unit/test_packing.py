import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_gdn.packing import resolve_packed_seq_params

CPU = torch.device("cpu")


def thd(q, q_padded=None, kv="q", kv_padded=None):
    def tensor(offsets):
        return None if offsets is None else torch.tensor(offsets, dtype=torch.int32)

    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=tensor(q),
        cu_seqlens_kv=tensor(q if kv == "q" else kv),
        cu_seqlens_q_padded=tensor(q_padded),
        cu_seqlens_kv_padded=tensor(kv_padded),
    )


def test_padded_offsets_win_over_real_ones():
    documents = resolve_packed_seq_params(thd([0, 3, 9], [0, 4, 12], kv_padded=[0, 4, 12]), 12, CPU)
    assert documents.offsets == (0, 4, 12)


def test_a_micro_batch_is_resolved_once_and_again_when_it_changes():
    params = thd([0, 4, 12])
    first = resolve_packed_seq_params(params, 12, CPU)
    assert resolve_packed_seq_params(params, 12, CPU) is first
    params.cu_seqlens_q[1] = 5
    params.cu_seqlens_kv[1] = 5
    assert resolve_packed_seq_params(params, 12, CPU).offsets == (0, 5, 12)
    params.cu_seqlens_q = params.cu_seqlens_kv = torch.tensor([0, 12])
    assert resolve_packed_seq_params(params, 12, CPU).offsets == (0, 12)


def test_boundaries_changed_behind_torchs_back_are_seen():
    """As a collective writes them, which leaves the version counter alone."""
    params = thd([0, 4, 12])
    resolve_packed_seq_params(params, 12, CPU)
    params.cu_seqlens_q.numpy()[1] = params.cu_seqlens_kv.numpy()[1] = 5
    assert resolve_packed_seq_params(params, 12, CPU).offsets == (0, 5, 12)


def test_boundaries_are_not_baked_into_a_graph(monkeypatch):
    params = thd([0, 4, 12])
    resolve_packed_seq_params(params, 12, CPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(NotImplementedError, match="captured in a CUDA graph"):
        resolve_packed_seq_params(params, 12, torch.device("cuda"))


def test_what_is_not_packed_has_no_documents():
    assert resolve_packed_seq_params(None, 12, CPU) is None
    assert resolve_packed_seq_params(PackedSeqParams(qkv_format="sbhd"), 12, CPU) is None


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (thd([0, 4, 10]), "ends at 10, but the buffer holds 12"),
        (thd([0, 4, 14]), "ends at 14"),
        (thd([2, 12]), "starts at 2"),
        (thd([0, 8, 4, 12]), "runs backwards at document 1: 8 is followed by 4"),
        (thd([12]), "names no document"),
        (thd(None, kv=None), "neither cu_seqlens_q_padded nor"),
        (thd([0, 12], kv=[0, 6, 12]), "they must agree"),
        (thd([0, 5, 9], [0, 4, 12]), "one slot per document"),
        (thd([0, 3], [0, 4, 12]), "one slot per document"),
    ],
)
def test_bad_boundaries_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        resolve_packed_seq_params(params, 12, CPU)
