"""Packed batches, each context-parallel rank's share of them, and a ``Trainer`` over such ranks.

Legend: S tokens of the packed row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ...context_parallel import SequenceLayout, local_indices
from .layer import CPAwareGatedDeltaNet, DropInOptions
from .place import group_of

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object  # the user's class has transformers' Trainer after this mixin


IGNORED = -100
_COLUMNS = ("input_ids", "labels", "attention_mask")
_OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k")


class PackingCollator:
    """Lays documents end to end in one row: ``collator([{"input_ids": [...]}, ...]) -> batch``.

    The batch has ``input_ids``, ``position_ids`` (from 0 in every document), ``labels`` (ignored at
    the start of a document, which no token predicts), ``shift_labels`` (what the token at each
    position must predict; ignored at the end of a document) and ``cu_seq_lens_q``,
    ``cu_seq_lens_k``, ``max_length_q``, ``max_length_k``. With ``shift_labels`` the loss of
    transformers' models does not shift labels itself, which would be wrong in a share of a row.

    Args:
        pad_to_multiple_of: the row is filled up to a multiple of it, by a document of
            ``pad_token_id`` whose labels are ignored. ``2 * cp`` for context parallelism.

    Raises:
        ValueError: no tokens, labels of another length than their document, documents with padding
            (an ``attention_mask`` with 0), or columns that would be lost.
    """

    def __init__(self, pad_to_multiple_of: int = 1, pad_token_id: int = 0) -> None:
        if pad_to_multiple_of < 1:
            raise ValueError(f"pad_to_multiple_of={pad_to_multiple_of} must be at least 1.")
        self.multiple, self.pad = pad_to_multiple_of, pad_token_id

    def __call__(self, documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if not documents:
            raise ValueError("there are no documents to pack.")
        for number, document in enumerate(documents):
            _require_known(number, document)
        rows = [_list(document["input_ids"]) for document in documents]
        labels = [_list(document.get("labels", document["input_ids"])) for document in documents]
        if not any(rows):
            raise ValueError(f"the {len(rows)} documents have no tokens.")
        if gap := -sum(map(len, rows)) % self.multiple:
            rows.append([self.pad] * gap)
            labels.append([IGNORED] * gap)
        labels = [row for row in labels if row]
        lengths = [len(row) for row in rows]
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        longest = max(lengths)
        return {
            "input_ids": torch.tensor(sum(rows, []))[None],
            "labels": torch.tensor(sum(([IGNORED, *row[1:]] for row in labels), []))[None],
            "shift_labels": torch.tensor(sum(([*row[1:], IGNORED] for row in labels), []))[None],
            "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
            "cu_seq_lens_q": offsets,
            "cu_seq_lens_k": offsets,
            "max_length_q": longest,
            "max_length_k": longest,
        }


def context_parallel_share(
    batch: Mapping[str, Any],
    cp_mesh: Any,
    layout: str | SequenceLayout = SequenceLayout.ZIGZAG_BUFFER,
) -> dict[str, Any]:
    """This rank's share of a packed batch: of every tensor over tokens, this rank's columns.

    Args:
        batch: as :class:`PackingCollator` makes it, the same on all ranks. Tensors ``[1, S]``,
            ``[1, S, ...]`` and ``[n, 1, S]`` (positions of a vision-language model) are cut along
            S; offsets and what has no S pass whole.
        cp_mesh, layout: as given to :func:`.patching.patch`.

    Raises:
        ValueError: tokens that the layout cannot cut evenly; pad with ``pad_to_multiple_of``.
    """
    if "input_ids" not in batch:
        raise ValueError(f"the batch has no input_ids to be cut by; it has {', '.join(batch)}.")
    rows, tokens = batch["input_ids"].shape[:2]
    layout = SequenceLayout.parse(layout)
    lengths = [tokens]
    if layout is SequenceLayout.ZIGZAG and "cu_seq_lens_q" in batch:
        lengths = batch["cu_seq_lens_q"].diff().tolist()
    own = local_indices(lengths, cp_mesh.size(), cp_mesh.get_local_rank(), layout)
    share = {}
    for name, x in batch.items():
        if not isinstance(x, Tensor) or name in _OFFSETS or tokens not in x.shape:
            share[name] = x
        elif x.shape[:2] == (rows, tokens):
            share[name] = x[:, own.to(x.device)]
        elif x.dim() == 3 and x.shape[1:] == (rows, tokens):
            share[name] = x[..., own.to(x.device)]
        else:
            raise ValueError(
                f"{name} of shape {tuple(x.shape)} beside input_ids [{rows}, {tokens}]: it is not "
                f"known how ranks share it. Leave it out, or cut it and add it to the share."
            )
    return share


def _require_known(number: int, document: Mapping[str, Any]) -> None:
    for name in document:
        if name not in _COLUMNS:
            raise ValueError(
                f"document {number} has {name!r}, which would be lost: {', '.join(_COLUMNS)} are "
                f"packed. Take it out of the dataset (remove_columns)."
            )
        count, there = len(document["input_ids"]), len(document[name])
        if there != count:
            raise ValueError(
                f"document {number} has {count} input_ids and {there} {name}; there must be one "
                f"per token."
            )
    if 0 in _list(document.get("attention_mask", [])):
        raise ValueError(
            f"document {number} has padding (0 in its attention_mask), which would be packed as "
            f"tokens. Tokenize without padding."
        )


def _list(x: Any) -> list[int]:
    return x.tolist() if hasattr(x, "tolist") else list(x)


class ContextParallelTrainerMixin(Trainer):
    """Makes a ``Trainer`` train a patched model over its ``cp_mesh``.

        class CPTrainer(ContextParallelTrainerMixin, transformers.Trainer):
            pass

        patch(model, mesh, attention="gathered")
        collator = PackingCollator(pad_to_multiple_of=2 * mesh.size())
        CPTrainer(model, args, train_dataset=dataset, data_collator=collator).train()

    The ranks of one ``cp_mesh`` get the same batches, and ``compute_loss`` gives the model this
    rank's share of them. Gradients are those of one rank that has the whole batch: ``Trainer``
    divides every rank's sum by the number of labels on all of them. Works in front of any subclass
    of ``Trainer`` whose methods pass their arguments to ``super()``.

    Raises:
        ValueError: with context parallelism a dataset that is streamed, a batch without
            ``shift_labels``, ``label_smoothing_factor``, ``compute_loss_func``, or a model that is
            not patched.
        RuntimeError: training without a wrapper that sums gradients over the ranks.
        NotImplementedError: predictions, of which every rank has its share only.
    """

    def get_train_dataloader(self) -> Any:
        return self._same_on_all_ranks(super().get_train_dataloader())

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return self._same_on_all_ranks(super().get_eval_dataloader(*args, **kwargs))

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return self._same_on_all_ranks(super().get_test_dataloader(*args, **kwargs))

    def get_cp_size(self) -> int:
        """How many processes have the same batch; ``Trainer`` counts labels and batches by it."""
        group = group_of(self._options().cp_mesh)
        return 1 if group is None else group.size()

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Tensor | tuple[Tensor, Any]:
        """The loss of this rank's share of ``inputs``; without gradients, of the whole batch."""
        options = self._options()
        if group_of(options.cp_mesh) is None:
            return super().compute_loss(model, inputs, *args, **kwargs)
        self._require_shifted(inputs)
        trains, sharded = torch.is_grad_enabled(), isinstance(model, FSDPModule)
        if trains and model is self.model and not sharded:
            raise RuntimeError(
                f"the trainer runs {type(model).__name__} unwrapped, so its gradients are not "
                f"summed over the ranks. Trainer does so after an evaluate() before train(); set "
                f"eval_on_start=True instead."
            )
        share = context_parallel_share(inputs, options.cp_mesh, options.cp_layout)
        found = super().compute_loss(model, share, *args, **kwargs)
        if trains:
            return found
        loss, *outputs = found if isinstance(found, tuple) else (found,)
        loss = loss.clone()
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
        return (loss, *outputs) if outputs else loss

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        if not prediction_loss_only and group_of(self._options().cp_mesh) is not None:
            raise NotImplementedError(
                "every context-parallel rank has the predictions of its share of the tokens, so "
                "metrics and predict() cannot be computed from them here. Evaluate the loss "
                "(prediction_loss_only=True, no compute_metrics), or predict on one rank."
            )
        return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

    def _options(self) -> DropInOptions:
        assert self.model is not None
        for module in self.model.modules():
            if isinstance(module, CPAwareGatedDeltaNet):
                return module.drop_in.options
        raise ValueError(
            f"{type(self.model).__name__} has no replaced modules; call megatron_gdn.hf.patch on "
            f"it before the trainer is made."
        )

    def _same_on_all_ranks(self, loader: Any) -> Any:
        group = group_of(self._options().cp_mesh)
        if group is None:
            return loader
        sampler = getattr(loader, "batch_sampler", None)
        if sampler is None or not hasattr(sampler, "process_index") or sampler.split_batches:
            raise ValueError(
                f"a {type(loader.dataset).__name__} read by a {type(loader).__name__} is dealt to "
                f"processes in a way that context-parallel ranks cannot share. Give a dataset with "
                f"__len__ and __getitem__, and neither dispatch_batches nor split_batches."
            )
        # Number the groups like this one by their first ranks, which all processes gather.
        first: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(first, min(dist.get_process_group_ranks(group)))
        groups = sorted(set(first))
        sampler.num_processes = len(groups)
        sampler.process_index = groups.index(first[dist.get_rank()])
        return loader

    def _require_shifted(self, inputs: dict[str, Any]) -> None:
        for name, given in (
            ("label_smoothing_factor", self.args.label_smoothing_factor),
            ("compute_loss_func", self.compute_loss_func),
        ):
            if given:
                raise ValueError(
                    f"{name} with context parallelism: it would shift labels inside this rank's "
                    f"share of the sequence. Leave it out; the model's own loss takes shift_labels."
                )
        if not self.model_accepts_loss_kwargs:
            raise ValueError(
                f"{type(self.model).__name__} has accepts_loss_kwargs=False: its loss is a mean "
                f"over its own tokens, so ranks with different numbers of labels would not add up. "
                f"Set model.accepts_loss_kwargs = True before the trainer is made."
            )
        if "shift_labels" not in inputs:
            raise ValueError(
                f"the batch has {', '.join(inputs)} and no shift_labels; labels cannot be shifted "
                f"inside a share of a sequence. megatron_gdn.hf.PackingCollator makes them."
            )
