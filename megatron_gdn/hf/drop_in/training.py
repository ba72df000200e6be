"""Pack documents; train on packed batches with context parallelism; check that packed
documents do not change each other's outputs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .batch import context_parallel_share, group_of
from .families import plain_functions_on_cpu
from .layer import CPAwareGatedDeltaNet, DropInOptions

if TYPE_CHECKING:
    from torch.utils.data import DataLoader
    from transformers import Trainer
else:
    Trainer = object  # the user's class lists transformers' Trainer as the second base

IGNORED_LABEL = -100
_PACKED_COLUMNS = ("input_ids", "labels", "attention_mask")

logger = logging.getLogger(__name__)


# A document or a batch: name of a column -> list or tensor.
Columns = Mapping[str, Any]


class PackingCollator:
    """Lay documents end to end in one row:
    ``collator([{"input_ids": [...]}, ...]) -> batch``.

    The batch has ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q``,
    ``max_length_k`` and these columns ``[1, S]``:

    - ``input_ids``;
    - ``position_ids``, which start at 0 in every document;
    - ``labels``, ignored (-100) at a document's first token, since no token predicts it;
    - ``shift_labels``, the label of the next token, ignored at a document's last token.

    transformers' losses shift ``labels`` only if there are no ``shift_labels``. A shift
    inside a rank's share of a row would be wrong.

    The ``labels`` of a document are transformers' labels: at each token this token
    itself, or -100. The collator shifts them. Without ``labels`` it takes the
    document's ``input_ids``.

    Args:
        pad_to_multiple_of: the row is padded to a multiple of this number, by a
            document of ``pad_token_id`` with ignored labels. Context parallelism needs
            multiples of ``2 * cp``.

    Raises:
        ValueError: there are no tokens. Or a document has labels and ``input_ids`` of
            different lengths, labels that are shifted already, padding (0 in its
            ``attention_mask``), or columns that packing would drop.
    """

    def __init__(self, pad_to_multiple_of: int = 1, pad_token_id: int = 0) -> None:
        """The arguments are as in the class."""
        if pad_to_multiple_of < 1:
            raise ValueError(
                f"pad_to_multiple_of={pad_to_multiple_of} must be at least 1."
            )
        self.pad_to_multiple_of = pad_to_multiple_of
        self.pad_token_id = pad_token_id

    def __call__(self, documents: Sequence[Columns]) -> dict[str, Any]:
        """The batch of ``documents``."""
        if not documents:
            raise ValueError("there are no documents to pack.")
        # a list of numbers for each document, and at last for the padding
        token_lists = []
        label_lists = []
        for number, document in enumerate(documents):
            _require_packable(number, document)
            tokens = _to_list(document["input_ids"])
            labels = _to_list(document.get("labels", document["input_ids"]))
            _refuse_shifted_labels(number, tokens, labels)
            token_lists.append(tokens)
            label_lists.append(labels)
        if not any(token_lists):
            raise ValueError(f"the {len(token_lists)} documents have no tokens.")
        padding = -sum(map(len, token_lists)) % self.pad_to_multiple_of
        if padding:
            token_lists.append([self.pad_token_id] * padding)
            label_lists.append([IGNORED_LABEL] * padding)
        # an empty document has no first token whose label is ignored
        label_lists = [labels for labels in label_lists if labels]
        lengths = [len(tokens) for tokens in token_lists]

        def one_row(lists: Iterable[Iterable[int]]) -> Tensor:
            """The numbers of all ``lists``, joined to one row ``[1, tokens]``."""
            numbers = list(chain.from_iterable(lists))
            return torch.tensor(numbers, dtype=torch.int64, device="cpu")[None]

        offsets = torch.tensor(
            list(accumulate(lengths, initial=0)), dtype=torch.int32, device="cpu"
        )
        return {
            "input_ids": one_row(token_lists),
            "labels": one_row([IGNORED_LABEL] + labels[1:] for labels in label_lists),
            "shift_labels": one_row(
                labels[1:] + [IGNORED_LABEL] for labels in label_lists
            ),
            "position_ids": one_row(map(range, lengths)),
            "cu_seq_lens_q": offsets,
            "cu_seq_lens_k": offsets,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
        }


def _require_packable(number: int, document: Columns) -> None:
    """Raise a ValueError if document ``number`` has padding, unknown columns, or columns
    of unequal lengths."""
    count = len(document["input_ids"])
    for name, column in document.items():
        if name not in _PACKED_COLUMNS:
            raise ValueError(
                f"document {number} has {name!r}, which would be lost: "
                f"{', '.join(_PACKED_COLUMNS)} are packed. Take it out of the dataset "
                "(remove_columns)."
            )
        if len(column) != count:
            raise ValueError(
                f"document {number} has {count} input_ids and {len(column)} {name}; "
                "there must be one per token."
            )
    if 0 in _to_list(document.get("attention_mask", [])):
        raise ValueError(
            f"document {number} has padding (0 in its attention_mask), which would be "
            "packed as tokens. Tokenize without padding."
        )


def _refuse_shifted_labels(number: int, tokens: list[int], labels: list[int]) -> None:
    """Raise a ValueError if the labels of document ``number`` are its next tokens, and
    not the tokens themselves."""
    labelled = [i for i, label in enumerate(labels[:-1]) if label != IGNORED_LABEL]
    are_next = all(labels[i] == tokens[i + 1] for i in labelled)
    are_same = all(labels[i] == tokens[i] for i in labelled)
    if are_next and not are_same:
        raise ValueError(
            f"the labels of document {number} are its input_ids one token ahead. The "
            "collator shifts labels itself: give at each token the token itself, or "
            f"{IGNORED_LABEL} where the loss ignores it, or leave labels out."
        )


def _to_list(x: Any) -> list[int]:
    """The numbers of ``x``: a list, a torch tensor or a numpy array."""
    if hasattr(x, "tolist"):
        return x.tolist()
    return list(x)


class ContextParallelTrainerMixin(Trainer):
    """Lets a ``Trainer`` train a patched model over its ``cp_mesh``.

        class CPTrainer(ContextParallelTrainerMixin, transformers.Trainer):
            pass

        patch(model, mesh, attention="gathered")
        collator = PackingCollator(pad_to_multiple_of=2 * mesh.size())
        CPTrainer(model, args, train_dataset=dataset, data_collator=collator).train()

    The ranks of one ``cp_mesh`` get the same batches, and ``compute_loss`` gives the
    model this rank's share of each batch. ``Trainer`` divides every rank's sum of losses
    by the number of labels on all ranks. So gradients equal those of one rank with the
    whole batch. List the mixin before ``Trainer``, or before a subclass of ``Trainer``
    whose methods pass their arguments to ``super()``.

    Raises:
        ValueError: the model is not patched; or, with context parallelism, the dataset
            is streamed, a batch has no ``shift_labels``, or ``label_smoothing_factor``
            or ``compute_loss_func`` is set.
        RuntimeError: the model trains without a wrapper that sums gradients over the
            ranks.
        NotImplementedError: predictions are asked for; a rank can predict its own
            tokens only.
    """

    def get_train_dataloader(self) -> DataLoader:
        """``Trainer``'s loader, with the same batches on all ranks of a ``cp_mesh``."""
        return self._share_batches_in_group(super().get_train_dataloader())

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        """``Trainer``'s loader, with the same batches on all ranks of a ``cp_mesh``."""
        return self._share_batches_in_group(
            super().get_eval_dataloader(*args, **kwargs)
        )

    def get_cp_size(self) -> int:
        """The number of processes that share a batch; ``Trainer`` divides the number of
        all processes by it."""
        if self._cp_group is None:
            return 1
        return self._cp_group.size()

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Tensor | tuple[Tensor, Any]:
        """The loss of this rank's share of ``inputs``; in evaluation (without gradients)
        the mean of all ranks' losses."""
        options = self._drop_in_options()
        if self._cp_group is None:
            return super().compute_loss(model, inputs, *args, **kwargs)
        self._require_loss_of_shares(inputs)
        is_training = torch.is_grad_enabled()
        is_unwrapped = self.model is model and not isinstance(self.model, FSDPModule)
        if is_training and is_unwrapped:
            raise RuntimeError(
                f"the trainer runs {type(model).__name__} unwrapped, so its gradients "
                "are not summed over the ranks. Trainer leaves a model unwrapped if "
                "evaluate() ran before train(); set eval_on_start=True instead."
            )
        share = context_parallel_share(inputs, options.cp_mesh, options.cp_layout)
        result = super().compute_loss(model, share, *args, **kwargs)
        if is_training:
            return result
        # The loss, or a tuple of the loss and the model's outputs. The sum over ranks
        # is written into a copy, since the outputs may hold the loss too.
        if isinstance(result, tuple):
            loss = result[0].clone()
        else:
            loss = result.clone()
        dist.all_reduce(loss, group=dist.group.WORLD)
        loss /= dist.get_world_size()
        if isinstance(result, tuple) and len(result) > 1:
            return (loss,) + result[1:]
        return loss

    def prediction_step(
        self,
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Evaluate a batch; under context parallelism ``prediction_loss_only`` must be
        True."""
        if not prediction_loss_only and self._cp_group is not None:
            raise NotImplementedError(
                "every context-parallel rank has the predictions of its share of the "
                "tokens, so metrics and predict() cannot be computed from them here. "
                "Evaluate the loss (prediction_loss_only=True, no compute_metrics), or "
                "predict on one rank."
            )
        return super().prediction_step(
            model, inputs, prediction_loss_only, *args, **kwargs
        )

    def _drop_in_options(self) -> DropInOptions:
        """The options of the patched model; a ValueError if the model is not patched."""
        assert self.model is not None
        for module in self.model.modules():
            if isinstance(module, CPAwareGatedDeltaNet):
                return module.drop_in.options
        raise ValueError(
            f"{type(self.model).__name__} has no replaced modules; call "
            "megatron_gdn.hf.patch on it before the trainer is made."
        )

    @property
    def _cp_group(self) -> dist.ProcessGroup | None:
        """The process group of the model's ``cp_mesh``; None on one rank."""
        return group_of(self._drop_in_options().cp_mesh)

    def _share_batches_in_group(self, loader: DataLoader) -> DataLoader:
        """``loader``, changed in place so that all ranks of a context-parallel group get
        the same batches."""
        group = self._cp_group
        if group is None:
            return loader
        sampler: Any = getattr(loader, "batch_sampler", None)
        if not hasattr(sampler, "process_index") or sampler.split_batches:
            raise ValueError(
                f"a {type(loader.dataset).__name__} read by a {type(loader).__name__} "
                "is dealt to processes in a way that context-parallel ranks cannot "
                "share. Give a dataset with __len__ and __getitem__, and neither "
                "dispatch_batches nor split_batches."
            )
        # accelerate's sampler deals each num_processes-th batch to one process.
        # The sampler must count each context-parallel group as one process. The first
        # rank of a group identifies the group.
        first_ranks = [0] * dist.get_world_size()
        dist.all_gather_object(
            first_ranks,
            min(dist.get_process_group_ranks(group)),
            group=dist.group.WORLD,
        )
        groups = sorted(set(first_ranks))
        sampler.num_processes = len(groups)
        sampler.process_index = groups.index(first_ranks[dist.get_rank()])
        return loader

    def _require_loss_of_shares(self, inputs: Columns) -> None:
        """Raise a ValueError if the loss of a rank's share would be wrong with these
        ``inputs`` or with the trainer's options."""
        owners = {"label_smoothing_factor": self.args, "compute_loss_func": self}
        for name, owner in owners.items():
            if getattr(owner, name):
                raise ValueError(
                    f"{name} with context parallelism: it would shift labels inside "
                    "this rank's share of the sequence. Leave it out; the model's own "
                    "loss takes shift_labels."
                )
        if not self.model_accepts_loss_kwargs:
            raise ValueError(
                f"{type(self.model).__name__} has accepts_loss_kwargs=False: its loss "
                "is a mean over its own tokens, so a sum over ranks with unequal label "
                "counts is wrong. Set model.accepts_loss_kwargs = True before the "
                "trainer is made."
            )
        if "shift_labels" not in inputs:
            raise ValueError(
                f"the batch has {', '.join(inputs)} and no shift_labels; labels cannot "
                "be shifted inside a share of a sequence. "
                "megatron_gdn.hf.PackingCollator makes them."
            )


class PackingLeak(AssertionError):
    """Raised by :func:`assert_no_packing_leak` if documents change each other's
    outputs.

    ``leaks``: pairs (i, j) of numbers of documents; document i changes the output of
    document j.
    """

    def __init__(self, message: str, leaks: list[tuple[int, int]]) -> None:
        super().__init__(message)
        self.leaks = leaks


class PackingReach(NamedTuple):
    """How much N packed documents change each other's outputs."""

    # fp32 [N, N]; [i, j]: the largest change of document j's output if document i is
    # replaced
    change: Tensor
    largest: Tensor  # fp32 [N]: the largest absolute output of each document

    def leaks(self, tolerance: float = 1e-5) -> list[tuple[int, int]]:
        """The pairs (i, j), i != j, in which a replaced document i changes document j's
        output by more than ``tolerance`` times the largest output."""
        bound = tolerance * self.largest.max()
        leaks = ~(self.change <= bound)  # NaN counts as a leak
        return [(i, j) for i, j in leaks.nonzero().tolist() if i != j]


def packing_reach(
    module: nn.Module,
    lengths: Sequence[int] = (5, 7, 4),
    *,
    source: str = "position_ids",
    seed: int = 0,
    **kwargs: object,
) -> PackingReach:
    """Measure how much packed documents change each other's outputs; the arguments are
    those of `assert_no_packing_leak`, and ``seed`` for the random documents."""
    if len(lengths) < 2 or min(lengths) < 1:
        raise ValueError(
            f"lengths={tuple(lengths)} must name two documents or more, of a token or "
            "more each."
        )
    device = next(module.parameters()).device
    plain_functions_on_cpu(module)
    # The token ids of document i are i, so that `input_ids` are document ids too.
    documents = [{"input_ids": [i] * n} for i, n in enumerate(lengths, 1)]
    row = PackingCollator()(documents)
    flash_keywords = {
        name: row[name]
        for name in row
        if name.startswith(("cu_seq_lens", "max_length"))
    }
    keywords_of_source = {
        "position_ids": {"position_ids": row["position_ids"]},
        "cu_seq_lens_q": flash_keywords,
        "packed_seq_ids": {"_packed_seq_ids": row["input_ids"]},
        "indexed_mask": {"attention_mask": row["input_ids"]},
    }
    if source not in keywords_of_source:
        raise ValueError(
            f"source={source!r} is not known; use one of "
            f"{', '.join(keywords_of_source)}."
        )
    keywords = {}
    for name, value in keywords_of_source[source].items():
        if isinstance(value, Tensor):
            value = value.to(device)
        keywords[name] = value
    keywords |= kwargs
    if hasattr(module, "get_input_embeddings"):
        keywords.setdefault("use_cache", False)
    offsets = row["cu_seq_lens_q"].tolist()
    columns = [slice(start, end) for start, end in pairwise(offsets)]
    generator = torch.Generator("cpu").manual_seed(seed)
    inputs = _draw_inputs(module, sum(lengths), generator).to(device)
    replacements = _draw_inputs(module, sum(lengths), generator).to(device)
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            reference = _output_tensor(module(inputs, **keywords))
            size = len(columns), len(columns)
            change = torch.empty(size, dtype=torch.float32, device="cpu")
            for i, replaced in enumerate(columns):
                changed_inputs = inputs.clone()
                changed_inputs[:, replaced] = replacements[:, replaced]
                output = _output_tensor(module(changed_inputs, **keywords))
                difference = (output - reference).abs()
                for j, observed in enumerate(columns):
                    change[i, j] = difference[:, observed].max()
    finally:
        module.train(training)
    largest = torch.stack([reference[:, document].abs().max() for document in columns])
    return PackingReach(change, largest.cpu())


def assert_no_packing_leak(
    module: nn.Module,
    lengths: Sequence[int] = (5, 7, 4),
    *,
    source: str = "position_ids",
    tolerance: float = 1e-5,
    **kwargs: Any,
) -> str:
    """Raise if a packed document changes the output of another document.

    The check packs documents of random tokens (or hidden states) in one row. It replaces
    one document at a time by another one of the same length. Then it compares the
    outputs of the other documents. Unpatched models of transformers can be checked too.

    Args:
        module: a model with ``get_input_embeddings`` and logits or
            ``last_hidden_state``, or a layer that maps hidden states ``[1, S, D]`` to
            hidden states.
        lengths: tokens of each document.
        source: the argument that gives the documents to the module: ``"position_ids"``,
            ``"cu_seq_lens_q"`` (flash attention's keywords, which transformers refuses
            without flash kernels), ``"packed_seq_ids"`` or ``"indexed_mask"``.
        tolerance: changes up to this fraction of the largest output are not leaks. With
            0 the outputs must be equal. In a model with experts, the rounding of a
            token's output may depend on other tokens.
        kwargs: other keywords of the module, and ``seed`` for the random documents.

    Returns:
        one line that says what was found; the line is also logged.

    Raises:
        PackingLeak: a document changed another document's output; the message has the
            numbers of both and the change.
        ValueError: fewer than two documents, or an unknown source.
    """
    reach = packing_reach(module, lengths, source=source, **kwargs)
    name = type(module).__name__
    lengths = tuple(lengths)
    if leaks := reach.leaks(tolerance):
        message = f"packed documents of {lengths} tokens reach each other in {name}:"
        for i, j in leaks:
            message += (
                f"\n  document {i} changes document {j} by {reach.change[i, j]:.3e} "
                f"(its largest output is {reach.largest[j]:.3e})"
            )
        raise PackingLeak(message, leaks)
    changes_of_others = reach.change.fill_diagonal_(0)
    line = (
        f"{name}: no packed document of {lengths} tokens, told by {source}, reaches "
        f"another (largest change {changes_of_others.max().item():.1e}, largest output "
        f"{reach.largest.max().item():.1e})"
    )
    logger.info(line)
    return line


def _draw_inputs(module: Any, tokens: int, generator: torch.Generator) -> Tensor:
    """Random token ids ``[1, tokens]`` for a model, random hidden states for a
    layer."""
    if hasattr(module, "get_input_embeddings"):
        vocabulary = module.get_input_embeddings().weight.shape[0]
        return torch.randint(vocabulary, (1, tokens), generator=generator, device="cpu")
    width = getattr(module, "hidden_size", None)
    if width is None:
        raise ValueError(
            f"{type(module).__name__} has no hidden_size, so hidden states cannot be "
            "drawn for it; give a transformers model or linear-attention module."
        )
    hidden = torch.randn(
        1, tokens, width, generator=generator, dtype=torch.float32, device="cpu"
    )
    return hidden.to(next(module.parameters()).dtype)


def _output_tensor(returned: Any) -> Tensor:
    """The logits or hidden states in ``returned``, in fp32. A module returns
    transformers' output object, a tuple or a tensor."""
    for name in ("logits", "last_hidden_state"):
        if getattr(returned, name, None) is not None:
            return getattr(returned, name).float()
    if isinstance(returned, tuple):
        return returned[0].float()
    return returned.float()
