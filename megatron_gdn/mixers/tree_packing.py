"""Packed documents that share prefixes: a prompt is computed once for all its responses.

Legend: N documents, T tokens of the packed buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

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

    `GatedDeltaNet`, `Mamba2Mixer` and the local attention of this project's specs take these
    parameters; with context parallelism the mixers run headwise. ``qkv_format`` is ``"thd_tree"``,
    so that attention of Transformer Engine refuses them. Megatron's own GatedDeltaNet and its MLA
    do not look, and would read the buffer as one sequence.

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
    slots = [-(-length // multiple_of) * multiple_of for length in lengths]
    documents = TreeDocuments(
        (0, *accumulate(slots)), torch.device("cpu"), tuple(parents), tuple(lengths)
    )
    longest = -(-documents.longest_sequence // multiple_of) * multiple_of
    params = params_of(TREE, lengths, slots, longest, device)
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


def pack_tree(
    prompts: Sequence[Tensor], responses: Sequence[Sequence[Tensor]], *, multiple_of: int = 1
) -> PackedTree:
    """Lay prompts and their responses out in one buffer, each prompt once.

    Args:
        prompts: of token ids, integers ``[n]``, at least one token each.
        responses: to each prompt, likewise; an empty one has no row.
        multiple_of: as in :func:`tree_packed_seq_params`.

    Raises:
        ValueError: another number of lists of responses than of prompts, a prompt without tokens,
            or tokens of another shape.
    """
    if len(prompts) != len(responses) or not prompts:
        raise ValueError(
            f"{len(prompts)} prompts and {len(responses)} lists of responses; give one list for "
            f"each prompt, and at least one prompt."
        )
    documents, parents = [], []
    for index, (prompt, answers) in enumerate(zip(prompts, responses, strict=True)):
        for x in (prompt, *answers):
            if x.dim() != 1 or x.is_floating_point():
                raise ValueError(
                    f"tokens of prompt {index} or of a response have shape {tuple(x.shape)} and "
                    f"dtype {x.dtype}; they must be integers [n]."
                )
        if not len(prompt):
            raise ValueError(f"prompt {index} has no token; give at least one, such as a BOS.")
        parent = len(documents)
        documents.append((prompt[:-1], prompt[1:]))
        parents += [-1] + [parent] * len(answers)
        for answer in answers:
            documents.append((torch.cat([prompt[-1:], answer])[:-1], answer))
    device = prompts[0].device
    lengths = [len(shown) for shown, _ in documents]
    params = tree_packed_seq_params(lengths, parents, multiple_of=multiple_of, device=device)
    starts = [0, *accumulate(-(-n // multiple_of) * multiple_of for n in lengths)]
    tokens = torch.zeros(1, starts[-1], dtype=torch.int64, device=device)
    position_ids, labels = torch.zeros_like(tokens), torch.zeros_like(tokens)
    loss_mask = torch.zeros(1, starts[-1], device=device)
    rows: list[list[slice]] = []
    for (shown, label), parent, start in zip(documents, parents, starts, strict=False):
        place = slice(start, start + len(shown))
        before = 0 if parent < 0 else lengths[parent]
        tokens[0, place], labels[0, place] = shown, label
        position_ids[0, place] = torch.arange(before, before + len(shown), device=device)
        if parent < 0:
            rows.append([])
        else:
            rows[-1].append(place)
            loss_mask[0, place] = 1.0
    of_prompts = tuple(tuple(places) for places in rows)
    return PackedTree(tokens, position_ids, labels, loss_mask, params, of_prompts)
