"""What a micro-batch says of its documents and trees, and what is refused."""

import copy
import dataclasses
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_gdn import (
    Documents,
    pack_groups,
    pack_tree,
    static_packed_seq_params,
    tree_packed_seq_params,
)
from megatron_gdn.context_parallel.headwise.functional import _documents_of
from megatron_gdn.mixers.packing import (
    TREE_FORMAT,
    MicroBatchShare,
    resolve_packed_seq_params,
)
from megatron_gdn.ops import causal_conv1d, recurrent_gated_delta_rule
from megatron_gdn.ops.documents import shortened
from megatron_gdn.ops.static_documents import StaticDocuments
from megatron_gdn.ops.trees import TreeDocuments
from tests.host_reads import no_host_reads

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
    documents = resolve_packed_seq_params(
        thd([0, 3, 9], [0, 4, 12], kv_padded=[0, 4, 12]), 12, CPU
    )
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


@pytest.mark.parametrize(
    "changes",
    [
        {"cu_seqlens_q": [0, 5, 12]},
        {"cu_seqlens_kv": [0, 5, 12]},
        {"cu_seqlens_q": [0, 5, 12], "cu_seqlens_kv": [0, 5, 12]},
        {"cu_seqlens_q_padded": [0, 5, 12], "cu_seqlens_kv_padded": [0, 5, 12]},
        {"cu_seqlens_q": None},
    ],
    ids=" and ".join,
)
def test_fixed_buffers_in_whose_place_others_were_put_are_refused(changes):
    params = static_packed_seq_params(12, 2, device="cpu")
    given = {
        name: None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
        for name, offsets in changes.items()
    }
    said = f"{next(iter(changes))} .*set_documents"
    with pytest.raises(ValueError, match=said):
        for name, offsets in given.items():
            setattr(params, name, offsets)
    with pytest.raises(ValueError, match=said):
        replace(params, **given)
    assert resolve_packed_seq_params(params, 12, CPU).boundaries is params.cu_seqlens_q


def test_boundaries_of_keys_may_be_left_out_of_fixed_buffers():
    params = static_packed_seq_params(12, 2, device="cpu")
    params.cu_seqlens_kv = None
    params = replace(params, max_seqlen_kv=None)
    assert resolve_packed_seq_params(params, 12, CPU).boundaries is params.cu_seqlens_q


@pytest.mark.parametrize(
    ("tokens", "device"), [(11, CPU), (12, torch.device("meta"))], ids=str
)
def test_fixed_buffers_of_other_tokens_or_another_device_are_refused(tokens, device):
    params = static_packed_seq_params(12, 2, device="cpu")
    said = f"12 tokens on cpu, and the layer has {tokens} tokens .* on {device};"
    with pytest.raises(ValueError, match=said):
        resolve_packed_seq_params(params, tokens, device)


def test_a_copy_has_the_same_fixed_buffers():
    params = static_packed_seq_params(12, 2, device="cpu")
    assert params.cu_seqlens_kv is params.cu_seqlens_q
    copied = resolve_packed_seq_params(replace(params, max_seqlen_q=8), 12, CPU)
    assert copied is resolve_packed_seq_params(params, 12, CPU)


def test_fixed_buffers_may_be_the_padded_slots_of_documents():
    params = static_packed_seq_params(12, 2, device="cpu")
    params.cu_seqlens_q_padded, params.cu_seqlens_kv_padded = (params.cu_seqlens_q,) * 2
    params.cu_seqlens_q = params.cu_seqlens_kv = torch.tensor(
        [0, 3, 9], dtype=torch.int32
    )
    documents = resolve_packed_seq_params(params, 12, CPU)
    assert documents.boundaries is params.cu_seqlens_q_padded


def test_boundaries_are_not_baked_into_a_graph(monkeypatch):
    params = thd([0, 4, 12])
    resolve_packed_seq_params(params, 12, CPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(NotImplementedError, match="captured in a CUDA graph"):
        resolve_packed_seq_params(params, 12, torch.device("cuda"))


@pytest.mark.parametrize("count", [1, 20, 21, 500])
def test_a_list_in_an_error_says_how_many_numbers_it_left_out(count):
    """The first ten and the last two of a long one are there."""
    numbers = range(1000, 1000 + count)
    said = [int(word) for word in re.findall(r"\d+", shortened(numbers))]
    if count > 20:
        assert said == [*numbers[:10], count - 12, *numbers[-2:]]
    else:
        assert said == list(numbers)


def test_what_is_not_packed_has_no_documents():
    assert resolve_packed_seq_params(None, 12, CPU) is None
    for layout in (None, "sbhd", "bshd"):
        params = PackedSeqParams(qkv_format=layout, local_cp_size=1)
        assert resolve_packed_seq_params(params, 12, CPU) is None


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_q_padded"])
def test_boundaries_without_a_format_are_honoured(name):
    """None is the default of Megatron's PackedSeqParams."""
    params = PackedSeqParams(**{name: torch.tensor([0, 5, 12])})
    assert params.qkv_format is None
    assert resolve_packed_seq_params(params, 12, CPU).offsets == (0, 5, 12)


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "THD", "thd "])
@pytest.mark.parametrize(
    "name", ["cu_seqlens_q", "cu_seqlens_q_padded", "cu_seqlens_kv"]
)
def test_boundaries_in_another_format_are_refused(layout, name):
    params = PackedSeqParams(qkv_format=layout, **{name: torch.tensor([0, 5, 12])})
    with pytest.raises(ValueError, match=f"qkv_format={layout!r}.*'thd'"):
        resolve_packed_seq_params(params, 12, CPU)


@pytest.mark.parametrize(
    "make", [list, tuple, numpy.array, lambda x: numpy.array(x, numpy.int32)]
)
@pytest.mark.parametrize(
    "name", ["cu_seqlens_q", "cu_seqlens_q_padded", "cu_seqlens_kv"]
)
def test_boundaries_that_are_no_tensors_are_refused(make, name):
    params = thd([0, 5, 12])
    setattr(params, name, make([0, 5, 12]))
    with pytest.raises(TypeError, match=f"{name} is a .* must be a 1-D int32 tensor"):
        resolve_packed_seq_params(params, 12, CPU)


@pytest.mark.parametrize(
    "offsets", [(0, 5.0, 12), ("0", "12"), 12, numpy.array([0.0, 12.0])]
)
def test_offsets_on_the_host_are_integers(offsets):
    assert Documents.from_cu_seqlens(numpy.array([0, 5, 12]), 12).offsets == (0, 5, 12)
    with pytest.raises(TypeError, match="a sequence of integers"):
        Documents.from_cu_seqlens(offsets, 12)
    with pytest.raises(ValueError, match=r"1-D integer tensor.*torch\.bool"):
        Documents.from_cu_seqlens(torch.tensor([False, True]), 1)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            thd([0, 4, 10]),
            "ends at 10, which does not match the 12 .*that of all ranks before",
        ),
        (thd([0, 4, 14]), "ends at 14"),
        (thd([2, 12]), "starts at 2"),
        (thd([0, 8, 4, 12]), "runs backwards at document 1: 8 is followed by 4"),
        (thd([12]), "names no document"),
        (thd(None, kv=None), "neither cu_seqlens_q_padded nor"),
        (thd([0, 12], kv=[0, 6, 12]), "the two must be equal"),
        (thd([0, 5, 12], kv_padded=[0, 6, 12]), "the two must be equal"),
        (thd([0, 5, 9], [0, 4, 12]), "one slot per document"),
        (thd([0, 3], [0, 4, 12]), "one slot per document"),
        (PackedSeqParams(qkv_format="THD"), "qkv_format='THD'; legal are 'thd'"),
        (PackedSeqParams(seq_idx=torch.zeros(1, 12)), "seq_idx but no cu_seqlens_q"),
        (
            replace(static_packed_seq_params(12, 2, device="cpu"), qkv_format="bshd"),
            "qkv_format='bshd', which is not packed",
        ),
        (
            PackedSeqParams(
                cu_seqlens_q=torch.zeros(3, dtype=torch.int32, device="meta")
            ),
            "on the CPU or on a GPU, got .* on meta",
        ),
    ],
)
def test_bad_boundaries_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        resolve_packed_seq_params(params, 12, CPU)


def of_tokens(total, index=None, q=(0, 5, 5, 12), q_padded=None):
    """As Megatron makes them, with ``seq_idx`` from total_tokens, unless ``index`` is
    given."""
    params = replace(thd(q, q_padded, kv_padded=q_padded), total_tokens=total)
    if index is not None:
        params.seq_idx = torch.tensor([index], dtype=torch.int32)
    return params


@pytest.mark.parametrize(
    "params",
    [
        of_tokens(12),
        of_tokens(12, q=[0, 3, 9], q_padded=[0, 4, 12]),
        of_tokens(12, q=[0, 12]),
        of_tokens(None, [0] * 5 + [1] * 7),
        of_tokens(None, [3] * 5 + [0] * 7),
    ],
)
def test_a_number_of_tokens_and_numbers_of_documents_that_agree_are_accepted(params):
    assert resolve_packed_seq_params(params, 12, CPU).total_tokens == 12
    assert (params.total_tokens is None) or params.seq_idx.shape == (1, 12)


@pytest.mark.parametrize(
    "params, message",
    [
        (of_tokens(6), "total_tokens=6, and its documents have 12 tokens over all"),
        (of_tokens(13), "total_tokens=13"),
        (
            of_tokens(None, [0] * 6 + [1] * 6),
            r"seq_idx .* not those of cu_seqlens, \[0, 5, 5, 12]",
        ),
        (of_tokens(None, [0] * 12), "seq_idx"),
        (of_tokens(None, [0] * 5 + [1] * 6 + [2]), "seq_idx"),
        (of_tokens(None, [0] * 5 + [1]), r"seq_idx of shape \(1, 6\)"),
        (
            of_tokens(
                12, [0] * 3 + [1] * 6 + [2] * 3, q=[0, 3, 9], q_padded=[0, 4, 12]
            ),
            "seq_idx",
        ),
        (
            replace(static_packed_seq_params(12, 2, device="cpu"), total_tokens=12),
            "fixed buffers",
        ),
    ],
)
def test_a_number_of_tokens_and_numbers_of_documents_that_contradict_are_refused(
    params, message
):
    with pytest.raises(ValueError, match=message):
        resolve_packed_seq_params(params, 12, CPU)


def test_numbers_of_documents_that_are_given_later_are_compared_too():
    params = of_tokens(None)
    resolve_packed_seq_params(params, 12, CPU)
    params.seq_idx = torch.zeros(1, 12, dtype=torch.int32)
    with pytest.raises(ValueError, match="seq_idx"):
        resolve_packed_seq_params(params, 12, CPU)


PROMPTS = [torch.tensor([7, 8, 9]), torch.tensor([5])]
RESPONSES = [[torch.tensor([1, 2]), torch.tensor([3])], [torch.tensor([4, 6])]]


def test_prompts_and_responses_are_laid_out():
    packed = pack_tree(PROMPTS, RESPONSES, multiple_of=2)
    # [7 8] -> [9 1] and [9 .]; [] -> [5 4]
    assert packed.tokens.tolist() == [[7, 8, 9, 1, 9, 0, 5, 4]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 2, 0, 0, 1]]
    assert packed.labels.tolist() == [[8, 9, 1, 2, 3, 0, 4, 6]]
    assert packed.loss_mask.tolist() == [[0, 0, 1, 1, 1, 0, 1, 1]]
    params = packed.packed_seq_params
    assert params.cu_seqlens_q.tolist() == [0, 2, 4, 5, 5, 7]
    assert params.cu_seqlens_q_padded.tolist() == [0, 2, 4, 6, 6, 8]
    assert params.max_seqlen_q == 4
    documents = resolve_packed_seq_params(params, 8, CPU)
    assert isinstance(documents, TreeDocuments)
    assert documents.parents == (-1, 0, 0, -1, 3)
    assert documents.position_in_sequence_T.tolist() == [0, 1, 2, 3, 2, 3, 0, 1]
    rows = packed.unpack(packed.labels)
    assert [[x.tolist() for x in each] for each in rows] == [[[1, 2], [3]], [[4, 6]]]


@pytest.mark.parametrize(
    "prompts, responses, told",
    [
        ([], [], "at least one prompt"),
        (PROMPTS, RESPONSES[:1], "2 prompts and 1 lists of responses"),
        ([torch.tensor([], dtype=torch.int64)], [[]], "prompt 0 has no token"),
        ([torch.ones(2)], [[]], r"dtype torch.float32; they must be integers \[n\]"),
        ([[[1, 2]]], [[]], r"prompt 0 .* shape \(1, 2\) .* integers \[n\]"),
        ([[1]], [[[[2]]]], r"prompt 0 .* shape \(1, 1\) .* integers \[n\]"),
    ],
)
def test_other_prompts_are_refused(prompts, responses, told):
    with pytest.raises(ValueError, match=told):
        pack_tree(prompts, responses)


GROUPS = [
    ([7, 8, 9], [[1, 2], [3]]),
    ([5], [[4, 6], [], [1], [2, 2, 2]]),
    ([1, 2], [[8]]),
]


@pytest.mark.parametrize(
    "most_tokens, multiple_of, sizes",
    # Groups of 5, 6 and 2 tokens; in slots of two of 6, 8 and 4; a limit of 4 cuts the
    # first two.
    [
        (13, 1, [13]),
        (8, 1, [5, 8]),
        (6, 1, [5, 6, 2]),
        (4, 1, [4, 3, 3, 3, 2]),
        (12, 2, [6, 12]),
    ],
)
def test_groups_are_cut_into_micro_batches_and_come_back_in_order(
    most_tokens, multiple_of, sizes
):
    packed = pack_groups(GROUPS, most_tokens, multiple_of=multiple_of, device="cpu")
    found = [each.tokens.shape[1] for each in packed.micro_batches]
    assert found == sizes
    back = packed.unpack([each.labels for each in packed.micro_batches])
    assert [[x.tolist() for x in each] for each in back] == [each for _, each in GROUPS]


def test_a_group_larger_than_a_micro_batch_is_cut_between_its_responses():
    prompt = [1, 2, 3]
    answers = [[4, 4], [5], [6, 6, 6], [7]]
    packed = pack_groups([(prompt, answers)], 6, multiple_of=2, device="cpu")
    # Slots: 2 for the prompt, then 2, 2, 4 and 2.
    assert [each.tokens.tolist() for each in packed.micro_batches] == [
        [[1, 2, 3, 4, 3, 0]],
        [[1, 2, 3, 6, 6, 0]],
        [[1, 2, 3, 0]],
    ]
    back = packed.unpack([each.labels for each in packed.micro_batches])
    assert [[x.tolist() for x in each] for each in back] == [answers]


def test_a_response_that_fits_into_no_micro_batch_is_refused():
    told = r"prompt of group 1 and its longest response need 5 tokens .* most_tokens=4"
    with pytest.raises(ValueError, match=told):
        pack_groups([([1, 2], [[3]]), ([1, 2, 3], [[4], [5, 5, 5]])], 4, device="cpu")


def test_trees_are_packed_on_the_host_whatever_the_default_device_is():
    """``torch.device("meta")`` stands for a GPU; what comes up there has no values."""
    expected = pack_groups(GROUPS, 8, device="cpu").micro_batches
    with torch.device("meta"):
        found = pack_groups(GROUPS, 8, device="cpu").micro_batches
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.labels, other.labels)


def test_rows_of_another_buffer_are_refused():
    with pytest.raises(ValueError, match="do not fit a buffer of"):
        pack_tree(PROMPTS, RESPONSES).unpack(torch.zeros(1, 3))


def test_parents_are_never_lost_in_silence():
    params = tree_packed_seq_params([3, 2], [-1, 0], device="cpu")
    assert resolve_packed_seq_params(copy.copy(params), 5, CPU).parents == (-1, 0)
    without = dataclasses.replace(params)
    separate = copy.copy(params)
    separate.qkv_format = "thd"
    other = PackedSeqParams(qkv_format=TREE_FORMAT, cu_seqlens_q=params.cu_seqlens_q)
    for changed in (without, separate, other):
        with pytest.raises(
            ValueError, match="come from megatron_gdn.tree_packed_seq_params"
        ):
            resolve_packed_seq_params(changed, 5, CPU)


def test_ranks_and_recomputation_compare_the_parents():
    chain, fork = (
        resolve_packed_seq_params(
            tree_packed_seq_params([3, 2, 1], parents, device="cpu"), 6, CPU
        )
        for parents in ([-1, 0, 1], [-1, 0, 0])
    )
    assert chain.fingerprint != fork.fingerprint
    with pytest.raises(
        RuntimeError, match="changed between a forward and its recomputation"
    ):
        chain.require_unchanged(chain.stamp, fork.stamp)


def test_documents_know_the_stamp_of_equal_boundaries():
    """A recomputation may make its documents anew."""
    one, other = (Documents((0, 3, 7), CPU) for _ in range(2))
    assert one.has_stamp(one.stamp) and one.has_stamp(other.stamp)
    assert not one.has_stamp(Documents((0, 4, 7), CPU).stamp)


@pytest.mark.parametrize("kind", ["tensor", "inference tensor"])
def test_documents_of_boundaries_on_the_host_are_on_the_rows_device(kind):
    """Meta stands for a GPU."""
    with torch.inference_mode(kind == "inference tensor"):
        given = torch.tensor([0, 3, 5], dtype=torch.int32)
    for device in (torch.device("meta"), CPU):
        documents = _documents_of(given, 5, device)
        assert documents.device == device and documents.offsets == (0, 3, 5)
        assert _documents_of(given, 5, device).device == device
        for other in (torch.device("meta"), CPU):
            assert documents.to(other).device == other


def test_an_exchange_reads_boundaries_at_their_first_use_alone():
    """And again once they have changed, or for rows on another device."""
    given = torch.tensor([0, 3, 5])
    first = _documents_of(given, 5, CPU)
    with no_host_reads():
        assert _documents_of(given, 5, CPU) is first
    given[1] = 4
    assert _documents_of(given, 5, CPU).offsets == (0, 4, 5)


@pytest.mark.parametrize("packed", [None, PackedSeqParams(local_cp_size=1)])
def test_without_a_group_a_micro_batch_is_one_ranks(packed):
    """Megatron's dynamic context parallelism names no group for a size of 1."""
    share = MicroBatchShare.of(packed, None, None, 5, CPU)
    assert share.positions.tolist() == [0, 1, 2, 3, 4]
    (document,) = share.local_documents
    assert document.first_key == 0


@pytest.mark.parametrize("own", [None, 3, SimpleNamespace(step=3)])
def test_a_callers_own_ctx_is_no_checkpoint(own):
    """The first variable of a caller may have the name of autograd's contexts."""

    def evaluate(ctx):
        return resolve_packed_seq_params(thd([0, 4, 12]), 12, CPU)

    def before_its_first_value():
        documents.append(resolve_packed_seq_params(thd([0, 4, 12]), 12, CPU))
        ctx = documents.pop()
        return ctx

    documents = []
    before = copy.copy(own)
    with torch.no_grad():
        assert evaluate(own).offsets == before_its_first_value().offsets
    assert own == before


def test_fixed_buffers_made_in_an_evaluation_are_filled_in_training():
    with torch.inference_mode():
        documents = StaticDocuments(12, 3)
        documents.fill([0, 12])
    assert not documents.stamp.is_inference()  # autograd saves it
    documents.fill([0, 5, 12])
    assert documents.boundaries.tolist() == [0, 5, 12, 12]


def test_functions_make_documents_on_the_device_of_their_rows(monkeypatch):
    """Meta stands for a GPU."""
    made = []
    make = Documents.from_cu_seqlens

    def watched(*args, **kwargs):
        made.append(make(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(Documents, "from_cu_seqlens", watched)
    rows = torch.empty(1, 5, 2, 4, device="meta")
    gates = rows[..., 0]
    offsets = torch.tensor([0, 3, 5])
    for given in (offsets, offsets.tolist()):
        recurrent_gated_delta_rule(rows, rows, rows, gates, gates, cu_seqlens=given)
        causal_conv1d(rows[..., 0], rows[0, :3, :, 0].mT, cu_seqlens=given)
    assert [x.device.type for x in made] == ["meta"] * 4


def test_boundaries_are_int32_in_fixed_buffers_too():
    """As in PackedSeqParams; kernels read four bytes each."""
    made = StaticDocuments(12, 3)
    assert made.boundaries.dtype == torch.int32
    made.fill(torch.tensor([0, 5, 12]))
    assert made.boundaries.dtype == torch.int32
