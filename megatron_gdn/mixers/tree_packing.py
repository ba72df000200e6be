"""Packed documents that share prefixes: a prompt is computed once for all its
responses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
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
    """PackedSeqParams of packed documents, each of which may continue an earlier one.

    A document continues its parent: it starts from the parent's last state and last
    convolution rows, at the next position, and attends to all its ancestors. Each
    document's result is the same as in a separate sequence with its ancestors before
    it.

    The mixers support trees (under context parallelism only headwise), and so does the
    attention of `hybrid_stack_spec` and of local specs. Transformer Engine's attention
    refuses ``qkv_format`` ``"thd_tree"``. Megatron's GatedDeltaNet and MLA would read
    all documents as one sequence.

    Args:
        lengths: token count of each document; the child of an empty document continues
            its grandparent.
        parents: for each document the index of its parent, an earlier document; -1: no
            parent.
        multiple_of: every document is padded to a multiple of this number of tokens
            (children ignore the padding); ``2 * context_parallel_size`` if the buffer
            is cut in zigzag.
        device: the device of the result; it must be the layers' device.

    Returns:
        ``PackedSeqParams`` with int32 tensors ``[N + 1]``: ``cu_seqlens_*`` without
        padding, ``cu_seqlens_*_padded`` with padding. ``max_seqlen_*`` is the largest
        padded length of a document with all its ancestors.

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

    A prompt's document has all tokens of the prompt but the last. This last token is
    the first token of each response's document, since its label differs between
    responses.

    Attributes:
        tokens, position_ids, labels: int64 ``[1, T]``. A label is the next token of the
            prompt or of the response. All three are 0 at padding.
        loss_mask: fp32 ``[1, T]``, 1 if the label is a token of a response.
        packed_seq_params: from :func:`tree_packed_seq_params`.
        responses: for each prompt, and each of its responses, the slice of the buffer
            whose tokens predict the response.
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
        return [
            [token_values[0, response] for response in of_prompt]
            for of_prompt in self.responses
        ]


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
    target: Any = device
    if device is None:
        target = getattr(prompts[0], "device", "cpu")
    # For each document: int64 [4, slot], its tokens, positions, labels and loss mask.
    documents = []
    lengths = []
    parents = []
    slices_by_prompt = []
    start = 0  # the start of the next document in the buffer
    for index, (given, given_responses) in enumerate(
        zip(prompts, responses, strict=True)
    ):
        prompt = _on_host(given, index)
        if not len(prompt):
            raise ValueError(
                f"prompt {index} has no token; give at least one, such as a BOS."
            )
        last = len(prompt) - 1
        prompt_document = len(parents)
        # for each document: its parent, its first position, its tokens and then its
        # last label
        texts = [(-1, 0, prompt)]
        for response in given_responses:
            text = torch.cat([prompt[last:], _on_host(response, index)])
            texts.append((prompt_document, last, text))
        slices = []
        for parent, position, text in texts:
            length = len(text) - 1
            positions = torch.arange(position, position + length, device="cpu")
            in_loss = torch.full_like(positions, parent >= 0)
            document = torch.stack([text[:-1], positions, text[1:], in_loss])
            documents.append(F.pad(document, (0, -length % multiple_of)))
            slices.append(slice(start, start + length))
            lengths.append(length)
            parents.append(parent)
            start += documents[-1].shape[1]
        slices_by_prompt.append(tuple(slices[1:]))  # without the prompt's own slice
    params = tree_packed_seq_params(
        lengths, parents, multiple_of=multiple_of, device=target
    )
    tokens, position_ids, labels, in_loss = to_device(
        torch.cat(documents, 1)[:, None], target
    )
    return PackedTree(
        tokens, position_ids, labels, in_loss.float(), params, tuple(slices_by_prompt)
    )


class PackedGroups(NamedTuple):
    """Micro-batches of prompts with their responses, as :func:`pack_groups` makes
    them."""

    micro_batches: tuple[PackedTree, ...]
    counts: tuple[int, ...]  # the number of responses of each group

    def unpack(self, token_values: Sequence[Tensor]) -> list[list[Tensor]]:
        """For every group, a list with the values ``[n, ...]`` of each response, in
        order.

        ``token_values`` has one tensor per micro-batch, with the shape that
        :meth:`PackedTree.unpack` takes.
        """
        # the responses of all groups, in order
        responses = []
        for packed, values in zip(self.micro_batches, token_values, strict=True):
            for of_prompt in packed.unpack(values):
                responses.extend(of_prompt)
        by_group = []
        first = 0
        for count in self.counts:
            by_group.append(responses[first : first + count])
            first += count
        return by_group


def pack_groups(
    groups: Sequence[tuple[Tokens, Sequence[Tokens]]],
    most_tokens: int,
    *,
    multiple_of: int = 1,
    device: torch.device | str = "cuda",
) -> PackedGroups:
    """Pack groups, each a prompt and its responses, into micro-batches, in order.

    A group that fits into one micro-batch stays together. A larger group is cut between
    responses. Every micro-batch with responses of the group then computes the prompt
    once.

    Args:
        groups, multiple_of, device: as in :func:`pack_tree`.
        most_tokens: the largest number of tokens of a micro-batch, padding included.

    Raises:
        ValueError: as in `pack_tree`, or if a prompt and one response exceed
            ``most_tokens``.
    """
    # For each micro-batch: its prompts, each with a list of responses.
    batches: list[list[tuple[Tokens, list[Tokens]]]] = []
    free = 0  # tokens that still fit into the last micro-batch
    for index, (prompt, responses) in enumerate(groups):
        (prompt_tokens,) = padded_lengths((len(prompt) - 1,), multiple_of)
        response_tokens = padded_lengths(tuple(map(len, responses)), multiple_of)
        least = prompt_tokens + max(response_tokens, default=0)
        if least > most_tokens:
            raise ValueError(
                f"the prompt of group {index} and its longest response need {least} "
                f"tokens of a micro-batch, and most_tokens={most_tokens}; raise it, or "
                "leave the group out."
            )
        if not batches or prompt_tokens + sum(response_tokens) > free:
            batches.append([])
            free = most_tokens
        together: list[Tokens] = []  # the group's responses in the last micro-batch
        batches[-1].append((prompt, together))
        free -= prompt_tokens
        for response, tokens in zip(responses, response_tokens, strict=True):
            if tokens > free:
                together = []
                batches.append([(prompt, together)])
                free = most_tokens - prompt_tokens
            together.append(response)
            free -= tokens
    packed = tuple(
        pack_tree(
            [prompt for prompt, _ in batch],
            [responses for _, responses in batch],
            multiple_of=multiple_of,
            device=device,
        )
        for batch in batches
    )
    return PackedGroups(packed, tuple(len(responses) for _, responses in groups))


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
