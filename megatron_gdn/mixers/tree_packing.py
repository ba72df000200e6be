"""Packed documents that share prefixes: a prompt is computed once for all its
responses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from ..ops.host_tables import to_device
from ..ops.trees import TreeDocuments
from .packing import PARENTS_ATTRIBUTE, TREE_FORMAT
from .padding import packed_seq_params_of, padded_lengths

Tokens = Tensor | Sequence[int]


def tree_packed_seq_params(
    lengths: Sequence[int],
    parents: Sequence[int],
    *,
    multiple_of: int = 1,
    device: torch.device | str = "cuda",
) -> PackedSeqParams:
    """Boundaries of packed documents, each of which may continue an earlier one.

    A document continues its parent: it starts from the parent's last state and last
    convolution rows, at the next position, and attends to all its ancestors. A
    document's result is the same as at the end of one sequence that has the document's
    ancestors before it.

    The mixers support trees (under context parallelism only headwise), and so does the
    attention of `hybrid_stack_spec` and of local specs. Transformer Engine's attention
    refuses ``qkv_format`` ``"thd_tree"``. Megatron's GatedDeltaNet and MLA would read
    all documents as one sequence.

    Args:
        lengths: token count of each document; a child of an empty one continues its
            grandparent.
        parents: for each document the index of its parent, an earlier document; -1 for
            none.
        multiple_of: every document is padded to a multiple of this number of tokens
            (children ignore the padding); ``2 * context_parallel_size`` if the buffer
            is cut in zigzag.
        device: the device of the result; it must be the layers' device.

    Returns:
        int32 ``[N + 1]``: ``cu_seqlens_*`` without padding, ``cu_seqlens_*_padded``
        with padding; ``max_seqlen_*`` is the largest length of a document with all its
        ancestors, padded.

    Raises:
        ValueError: ``lengths`` and ``parents`` do not fit, or ``multiple_of`` is below
            1.
    """
    slots = padded_lengths(lengths, multiple_of)
    documents = TreeDocuments(
        tuple(accumulate(slots, initial=0)),
        torch.device("cpu"),
        tuple(parents),
        tuple(lengths),
    )
    (longest,) = padded_lengths((documents.longest_sequence,), multiple_of)
    params = packed_seq_params_of(TREE_FORMAT, lengths, slots, longest, device)
    params.__dict__[PARENTS_ATTRIBUTE] = documents.parents
    return params


class PackedTree(NamedTuple):
    """Prompts and their responses in one buffer, as :func:`pack_tree` lays them out.

    The prompt's last token is the first token of each response's document, since the
    token's label differs between responses. A prompt's document has all its tokens but
    the last.

    Attributes:
        tokens, position_ids, labels: int64 ``[1, T]``. A label is the next token of the
            prompt or of the response. All three are 0 at padding.
        loss_mask: fp32 ``[1, T]``, 1 if the label is a token of a response.
        packed_seq_params: from :func:`tree_packed_seq_params`.
        responses: for each prompt and response, the slice of the buffer that predicts
            its tokens.
    """

    tokens: Tensor
    position_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    packed_seq_params: PackedSeqParams
    responses: tuple[tuple[slice, ...], ...]

    def unpack(self, token_values: Tensor) -> list[list[Tensor]]:
        """For every prompt, a list with the values ``[n, ...]`` of each response.

        ``token_values`` is ``[1, T, ...]``, for example log-probabilities of the
        labels. Entry j of a response is the value at the token that predicts the
        response's j-th token.
        """
        if token_values.shape[:2] != self.tokens.shape:
            raise ValueError(
                f"rows of shape {tuple(token_values.shape)} do not fit a buffer of "
                f"{tuple(self.tokens.shape)} tokens; with context parallelism give "
                "those of all ranks, in the order of the sequence."
            )
        return [[token_values[0, rows] for rows in each] for each in self.responses]


def pack_tree(
    prompts: Sequence[Tokens],
    responses: Sequence[Sequence[Tokens]],
    *,
    multiple_of: int = 1,
    device: torch.device | str | None = None,
) -> PackedTree:
    """Lay prompts and their responses out in one buffer, each prompt once.

    Args:
        prompts: token ids of each prompt, integers ``[n]`` or a list, at least one
            token each.
        responses: for each prompt a list of responses, each given as token ids like a
            prompt; an empty response has no tokens in the buffer.
        multiple_of: as in :func:`tree_packed_seq_params`.
        device: the device of the result; None: the device of the first prompt.

    Raises:
        ValueError: a prompt has no tokens or no list of responses, or tokens are not
            ``[n]``.
    """
    if len(prompts) != len(responses) or not prompts:
        raise ValueError(
            f"{len(prompts)} prompts and {len(responses)} lists of responses; give one "
            "list for each prompt, and at least one prompt."
        )
    where: Any = getattr(prompts[0], "device", "cpu") if device is None else device
    rows = []
    lengths = []
    parents = []
    of_prompts = []
    start = 0
    for index, (first, others) in enumerate(zip(prompts, responses, strict=True)):
        prompt = _on_host(first, index)
        answers = [_on_host(x, index) for x in others]
        if not len(prompt):
            raise ValueError(
                f"prompt {index} has no token; give at least one, such as a BOS."
            )
        last = len(prompt) - 1
        root = len(parents)
        places = []
        texts = [(-1, 0, prompt)] + [
            (root, last, torch.cat([prompt[last:], answer])) for answer in answers
        ]
        for parent, before, text in texts:
            length = len(text) - 1
            position = torch.arange(before, before + length, device="cpu")
            in_loss = torch.full_like(position, parent >= 0)
            document = torch.stack([text[:-1], position, text[1:], in_loss])
            rows.append(F.pad(document, (0, -length % multiple_of)))
            places.append(slice(start, start + length))
            lengths.append(length)
            parents.append(parent)
            start += rows[-1].shape[1]
        of_prompts.append(tuple(places[1:]))
    params = tree_packed_seq_params(
        lengths, parents, multiple_of=multiple_of, device=where
    )
    tokens, position_ids, labels, in_loss = to_device(
        torch.cat(rows, 1)[:, None], where
    )
    return PackedTree(
        tokens, position_ids, labels, in_loss.float(), params, tuple(of_prompts)
    )


class PackedGroups(NamedTuple):
    """Micro-batches of prompts with their responses, as :func:`pack_groups` cuts
    them."""

    micro_batches: tuple[PackedTree, ...]
    counts: tuple[int, ...]  # number of responses of every group

    def unpack(self, token_values: Sequence[Tensor]) -> list[list[Tensor]]:
        """For every group, a list with the values ``[n, ...]`` of each response, in
        order.

        ``token_values`` has one tensor per micro-batch, each as for
        :meth:`PackedTree.unpack`.
        """
        both = zip(self.micro_batches, token_values, strict=True)
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

    A group that fits into one micro-batch stays together. A larger group is cut between
    responses, and its prompt is computed once in every micro-batch that has responses
    of the group.

    Args:
        groups, multiple_of, device: as in :func:`pack_tree`.
        most_tokens: the largest number of tokens of a micro-batch, padding included.

    Raises:
        ValueError: as in `pack_tree`, or if a prompt and one response exceed
            ``most_tokens``.
    """
    cut: list[list[tuple[Tokens, list[Tokens]]]] = []
    room = 0
    for index, (prompt, answers) in enumerate(groups):
        (head,) = padded_lengths((len(prompt) - 1,), multiple_of)
        costs = padded_lengths(tuple(map(len, answers)), multiple_of)
        least = head + max(costs, default=0)
        if least > most_tokens:
            raise ValueError(
                f"the prompt of group {index} and its longest response need {least} "
                f"tokens of a micro-batch, and most_tokens={most_tokens}; raise it, or "
                "leave the group out."
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
    packed = tuple(
        pack_tree(
            [prompt for prompt, _ in each],
            [answers for _, answers in each],
            multiple_of=multiple_of,
            device=device,
        )
        for each in cut
    )
    return PackedGroups(packed, tuple(len(answers) for _, answers in groups))


def _on_host(tokens: Tokens, index: int) -> Tensor:
    """Token ids as int64 ``[n]`` on the CPU; an error message names prompt number
    ``index``."""
    x = torch.as_tensor(tokens, device="cpu")
    # torch makes an empty list fp32
    if x.dim() != 1 or (x.is_floating_point() and len(x)):
        raise ValueError(
            f"tokens of prompt {index} or of a response have shape {tuple(x.shape)} "
            f"and dtype {x.dtype}; they must be integers [n]."
        )
    return x.long()
