"""Packed documents that share prefixes: a prompt is computed once for all its responses.

Legend: N documents, T tokens of the packed buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, islice
from typing import Any, NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from ..ops.host_tables import to_device
from ..ops.trees import TreeDocuments
from .packing import PARENTS, TREE
from .padding import params_of


def tree_packed_seq_params(
    lengths: Sequence[int],
    parents: Sequence[int],
    *,
    multiple_of: int = 1,
    device: torch.device | str = "cuda",
) -> PackedSeqParams:
    """Boundaries of packed documents, each of which may continue an earlier one.

    A document whose parent is another starts where that one ended: from its last state, behind its
    last rows in the convolution, at the next position, and with attention to all that it
    continues. The result of every document is that of the whole sequence from its first ancestor
    on; what several sequences share is computed once.

    This project's mixers take these parameters, and the attention of `hybrid_stack_spec` and of
    local specs; with context parallelism the mixers run headwise. ``qkv_format`` is
    ``"thd_tree"``, which Transformer Engine's attention refuses. Megatron's own GatedDeltaNet and
    its MLA do not look, and would read the buffer as one sequence.

    Args:
        lengths: tokens of each document; 0 is legal, and its children continue its parent.
        parents: for each document the index of an earlier one, -1 for none.
        multiple_of: every document's slot in the buffer is filled up to a multiple of it, with
            padding behind the document's tokens; ``2 * context_parallel_size`` where the buffer is
            cut in zigzag. No document continues padding.
        device: where the layers run.

    Returns:
        ``PackedSeqParams`` with int32 ``[N + 1]`` boundaries: ``cu_seqlens_*`` of tokens,
        ``cu_seqlens_*_padded`` of slots. ``max_seqlen_*`` is the longest sequence, rounded up.

    Raises:
        ValueError: lengths or parents that do not fit, ``multiple_of`` less than 1.

    Source: shared prefixes in training, as in Megatron-LM's pull requests 7386 and 7387 for
    attention and Mamba.
    """
    if multiple_of < 1:
        raise ValueError(f"multiple_of={multiple_of} must be at least 1 (1 leaves no padding).")
    slots = [_slot(length, multiple_of) for length in lengths]
    documents = TreeDocuments(
        (0, *accumulate(slots)), torch.device("cpu"), tuple(parents), tuple(lengths)
    )
    params = params_of(TREE, lengths, slots, _slot(documents.longest_sequence, multiple_of), device)
    params.__dict__[PARENTS] = tuple(parents)
    return params


class PackedTree(NamedTuple):
    """Prompts and their responses in one buffer, as :func:`pack_tree` lays them out.

    A response's document begins with the prompt's last token, whose output predicts the response's
    first one: there each response has an output, a label and a loss of its own. So a prompt's
    document has all its tokens but the last.

    Attributes:
        tokens, position_ids, labels: int64 ``[1, T]``. A label is the next token of the prompt or
            of the response; where there is none, and at padding, it is 0.
        loss_mask: fp32 ``[1, T]``, 1 where the label is a token of a response.
        packed_seq_params: of :func:`tree_packed_seq_params`.
        responses: where the rows lie that predict each response's tokens, for every prompt a list.
    """

    tokens: Tensor
    position_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    packed_seq_params: PackedSeqParams
    responses: tuple[tuple[slice, ...], ...]

    def unpack(self, of_tokens: Tensor) -> list[list[Tensor]]:
        """What the buffer's rows hold for each response: for every prompt a list of ``[n, ...]``.

        ``of_tokens`` ``[1, T, ...]`` are such as log-probabilities of the labels. Row j belongs to
        the j-th token of a response: the output that predicts it.
        """
        if of_tokens.shape[:2] != self.tokens.shape:
            raise ValueError(
                f"rows of shape {tuple(of_tokens.shape)} do not fit a buffer of "
                f"{tuple(self.tokens.shape)} tokens; with context parallelism give those of all "
                f"ranks, in the order of the sequence."
            )
        return [[of_tokens[0, rows] for rows in each] for each in self.responses]


Tokens = Tensor | Sequence[int]


def pack_tree(
    prompts: Sequence[Tokens],
    responses: Sequence[Sequence[Tokens]],
    *,
    multiple_of: int = 1,
    device: torch.device | str | None = None,
) -> PackedTree:
    """Lay prompts and their responses out in one buffer, each prompt once.

    Args:
        prompts: of token ids, integers ``[n]`` or lists, at least one token each.
        responses: to each prompt, likewise; an empty one has no row.
        multiple_of: as in :func:`tree_packed_seq_params`.
        device: of the result; None is that of the first prompt.

    Raises:
        ValueError: another number of lists of responses than of prompts, a prompt without tokens,
            or tokens of another shape.
    """
    if len(prompts) != len(responses) or not prompts:
        raise ValueError(
            f"{len(prompts)} prompts and {len(responses)} lists of responses; give one list for "
            f"each prompt, and at least one prompt."
        )
    where: Any = getattr(prompts[0], "device", "cpu") if device is None else device
    shown, labels, before, parents = [], [], [], []
    for index, group in enumerate(zip(prompts, responses, strict=True)):
        prompt, *answers = (_on_host(x, index) for x in (group[0], *group[1]))
        if not len(prompt):
            raise ValueError(f"prompt {index} has no token; give at least one, such as a BOS.")
        before += [0] + [len(prompt) - 1] * len(answers)
        parents += [-1] + [len(parents)] * len(answers)
        shown += [prompt[:-1], *(torch.cat([prompt[-1:], answer])[:-1] for answer in answers)]
        labels += [prompt[1:], *answers]
    lengths = [len(x) for x in shown]
    ends = list(accumulate(_slot(n, multiple_of) for n in lengths))
    buffers = torch.zeros(4, 1, ends[-1], dtype=torch.int64, device="cpu")
    rows: list[list[slice]] = []
    for i, (start, length) in enumerate(zip([0, *ends], lengths, strict=False)):
        place = slice(start, start + length)
        positions = torch.arange(before[i], before[i] + length, device="cpu")
        buffers[:3, 0, place] = torch.stack([shown[i], positions, labels[i]])
        buffers[3, 0, place] = parents[i] >= 0
        if parents[i] < 0:
            rows.append([])
        else:
            rows[-1].append(place)
    tokens, position_ids, next_tokens, in_loss = to_device(buffers, where)
    params = tree_packed_seq_params(lengths, parents, multiple_of=multiple_of, device=where)
    of_prompts = tuple(map(tuple, rows))
    return PackedTree(tokens, position_ids, next_tokens, in_loss.float(), params, of_prompts)


class PackedGroups(NamedTuple):
    """Micro-batches of prompts with their responses, as :func:`pack_groups` cuts them."""

    micro_batches: tuple[PackedTree, ...]
    counts: tuple[int, ...]  # of responses, for every group

    def unpack(self, of_tokens: Sequence[Tensor]) -> list[list[Tensor]]:
        """As :meth:`PackedTree.unpack`, from one ``[1, T, ...]`` for each micro-batch: for every
        group a list of its responses, both in the order in which they were given."""
        both = zip(self.micro_batches, of_tokens, strict=True)
        rows = (row for packed, x in both for each in packed.unpack(x) for row in each)
        return [list(islice(rows, count)) for count in self.counts]


def pack_groups(
    groups: Sequence[tuple[Tokens, Sequence[Tokens]]],
    most_tokens: int,
    *,
    multiple_of: int = 1,
    device: torch.device | str = "cuda",
) -> PackedGroups:
    """Pack groups, each a prompt and its responses, into micro-batches, in order.

    A group that fits into one micro-batch stays together. A larger one is cut between responses,
    and its prompt is computed once in every micro-batch that has some of them.

    Args:
        groups: token ids as in :func:`pack_tree`.
        most_tokens: of a micro-batch, with the padding of slots.
        multiple_of, device: as in :func:`pack_tree`.

    Raises:
        ValueError: as pack_tree; a prompt that does not fit with its longest response.
    """
    cut: list[list[tuple[Tokens, list[Tokens]]]] = []
    room = 0
    for index, (prompt, answers) in enumerate(groups):
        head = _slot(len(prompt) - 1, multiple_of)
        costs = [_slot(len(answer), multiple_of) for answer in answers]
        least = head + max(costs, default=0)
        if least > most_tokens:
            raise ValueError(
                f"the prompt of group {index} and its longest response need {least} tokens of a "
                f"micro-batch, and most_tokens={most_tokens}; raise it, or leave the group out."
            )
        if not cut or head + sum(costs) > room:
            cut.append([])
            room = most_tokens
        cut[-1].append((prompt, []))
        room -= head
        for answer, cost in zip(answers, costs, strict=True):
            if cost > room:
                cut.append([(prompt, [])])
                room = most_tokens - head
            cut[-1][-1][1].append(answer)
            room -= cost
    where: Any = {"multiple_of": multiple_of, "device": device}
    packed = (pack_tree(*zip(*each, strict=True), **where) for each in cut)
    return PackedGroups(tuple(packed), tuple(len(answers) for _, answers in groups))


def _slot(tokens: int, multiple_of: int) -> int:
    return -(-tokens // multiple_of) * multiple_of


def _on_host(tokens: Tokens, index: int) -> Tensor:
    x = torch.as_tensor(tokens, device="cpu")
    if x.dim() != 1 or (x.is_floating_point() and len(x)):  # an empty list becomes fp32
        raise ValueError(
            f"tokens of prompt {index} or of a response have shape {tuple(x.shape)} and dtype "
            f"{x.dtype}; they must be integers [n]."
        )
    return x.long()
