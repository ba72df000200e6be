"""Replace the linear-attention modules of a transformers model in place; undo the
replacement.

The text model's forward finds the documents of the batch once, for all layers. Under
context parallelism, ``attention="gathered"`` lets softmax attention gather the keys and
values of all ranks and attend with this rank's queries, document by document.

Legend: B batch, S sequence tokens, s this rank's tokens, H query heads, G key heads, D
head dim.
"""

from __future__ import annotations

import inspect
import logging
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...mixers.hooks import forward_name, runs_class_forward
from ...ops.host_tables import to_device
from .batch import ModelBatch, group_of, resolve_batch
from .families import (
    LEGAL,
    cache_parameter,
    linear_attentions,
    refuse_modules_that_mix,
    transformers_class,
)
from .gates import gate_owner
from .layer import CPAwareGatedDeltaNet, DropInOptions, become_drop_in, undo_drop_in
from .sources import Sources, cache_in, split_masks, text_positions

# A text model of transformers; its attributes depend on its class.
TextModel = Any
# Keyword arguments of a forward.
Keywords = dict[str, Any]

GATHERED = "megatron_gdn_gathered"
# Under this name a patched text model keeps the forward that another tool had set, or
# None.
_FORWARD_BEFORE = "_megatron_gdn_forward_before"

logger = logging.getLogger(__name__)


def patch(
    model: nn.Module,
    cp_mesh: object = None,
    *,
    attention: str | None = None,
    **options: object,
) -> Patch:
    """Let this package run every linear-attention module of a transformers model, in
    place.

    Supported: Qwen3-Next, Qwen3.5, Qwen3.5-MoE, Qwen4-Exp, OLMo Hybrid, Kimi Linear,
    GLM 5 next and Bailing Hybrid, also inside their vision-language classes. Modules,
    parameters, state-dict keys and optimizers stay valid; ``A_log`` and ``dt_bias``
    become fp32.

    Each forward finds packed documents in the model's arguments (:mod:`.sources`) and
    keeps their states apart. With context parallelism pass this rank's tokens,
    ``cu_seq_lens_q`` of the whole buffer or this rank's document ids, and optionally
    ``seq_index [s]``, the positions of this rank's tokens. Each rank has the gradients
    of its own tokens: sum them over ``cp_mesh``.

    Args:
        model: any model of these families, or its text model.
        cp_mesh: one-dimensional device mesh over the context-parallel ranks.
        cp_layout: how sequences are cut, if there is no ``seq_index``:
            ``"zigzag_buffer"`` (DualChunkSwap of the whole row), ``"contiguous"``, or
            ``"zigzag"`` (of every document).
        linear_cp_mode: ranks send rows (``"headwise"``), states (``"chunkwise"``), or
            ``"auto"``.
        backend, rule_operands, recompute_qkv: as in
            :class:`megatron_gdn.GatedDeltaNet`; a Kimi Delta Attention takes only
            `backend`.
        unpacked: what runs a batch that is not packed, on one rank: ``"transformers"``
            for transformers' own forward, bit for bit, ``"fused"`` for this package's
            mixer.
        attention: ``"gathered"`` lets softmax attention gather all ranks' keys and
            values, also for packed documents. If None, the caller must run softmax
            attention under context parallelism (torch's ``context_parallel``, ring
            attention), without packed documents.

    Returns:
        a handle. Its ``undo()``, or the end of a ``with`` block, restores the model.

    Raises:
        ValueError: the model has no modules to patch, is patched already, or refuses an
            option.
    """
    if attention not in (None, "gathered"):
        raise ValueError(
            f"attention={attention!r} is not known; use 'gathered' or None."
        )
    known = DropInOptions.from_keywords(cp_mesh=cp_mesh, **options)
    if attention is not None:
        from transformers import AttentionInterface

        AttentionInterface.register(GATHERED, gathered_attention)
    patched = Patch(model, known, attention is not None)
    logger.info("%s", patched)
    return patched


class Patch(AbstractContextManager):
    """A patched model; ``layers`` has the replaced modules by name."""

    def __init__(self, model: nn.Module, options: DropInOptions, gathers: bool) -> None:
        """Patch ``model``; if ``gathers``, softmax attention gathers all ranks' keys
        and values."""
        self.model = model
        self.layers: dict[str, CPAwareGatedDeltaNet] = {}
        self._changes = ExitStack()  # callbacks that undo the patch
        self._forwards: dict[nn.Module, Any] = {}
        texts = {
            name: cast(Any, one)
            for name, one in model.named_modules()
            if isinstance(getattr(one, "layers", None), nn.ModuleList)
            and any(linear_attentions(one))
        }
        if not texts:
            raise ValueError(
                f"{type(model).__name__} has no linear-attention modules that are "
                f"known here: legal are transformers' models of {LEGAL}, and their "
                "text models."
            )
        for name, layer in (
            one for text in texts.values() for one in text.named_modules()
        ):
            if isinstance(layer, CPAwareGatedDeltaNet):
                raise ValueError(
                    f"{name} is replaced already; undo the first patch before another "
                    "one."
                )
        try:
            for prefix, text in texts.items():
                self._replace_modules(prefix, text, options)
                self._wrap_forward(text, gathers)
        except Exception:
            self.undo()
            raise

    def __repr__(self) -> str:
        name = type(self.model).__name__
        count = len(self.layers)
        if not count:
            return f"Patch of {name}: undone"
        first, layer = next(iter(self.layers.items()))
        options = layer.drop_in.options
        group = group_of(options.cp_mesh)
        if group is None:
            ranks = "one rank"
        else:
            ranks = f"{group.size()} context-parallel ranks"
        runs = "every batch runs this package's mixer"
        if group is None and options.unpacked == "transformers":
            runs = (
                "packed batches run this package's mixer, others transformers' own "
                "forward"
            )
        summary = f"{count} linear-attention modules ({first} is the first) on {ranks}"
        return f"Patch of {name}: {summary}; {runs}"

    def undo(self) -> None:
        """Put back transformers' own classes and the dtypes of ``A_log`` and
        ``dt_bias``.

        Raises:
            RuntimeError: after the patch, a module was wrapped (for example by
                ``fully_shard``), or a text model's ``forward`` was replaced.
        """
        for name, layer in self.layers.items():
            is_replaced = type(layer).__mro__[1] is CPAwareGatedDeltaNet
            if not is_replaced or gate_owner(layer)._gates_are_sharded:
                raise RuntimeError(
                    f"{name} has become a {type(layer).__name__} since it was replaced "
                    "(sharded?), so the patch cannot be undone. Undo a patch before "
                    "wrapping the model."
                )
            if not runs_class_forward(layer):
                raise RuntimeError(
                    f"the forward of {name} was replaced since it was patched, and may "
                    "call the patched forward. Restore that forward before undoing the "
                    "patch."
                )
        for text, forward in self._forwards.items():
            if (
                getattr(vars(text).get(forward_name(text)), "__func__", None)
                is not forward
            ):
                raise RuntimeError(
                    f"the forward of {type(text).__name__} was replaced since it was "
                    "patched, and may call the patched forward. Restore that forward "
                    "before undoing the patch."
                )
        self._changes.close()
        self._forwards = {}
        self.layers = {}

    def __exit__(self, *_: object) -> None:
        self.undo()

    def _replace_modules(
        self, prefix: str, text: TextModel, options: DropInOptions
    ) -> None:
        """Replace the linear attentions of the text model ``text``, whose name is
        ``prefix``."""
        for name, module in text.named_modules(prefix=prefix):
            if transformers_class(module) is not None:
                layer = self.layers[name] = become_drop_in(module, text.config, options)
                self._changes.callback(undo_drop_in, layer)
        stored = {
            name: layer.drop_in.stored["A_log"] for name, layer in self.layers.items()
        }
        if rounded := [name for name, dtype in stored.items() if dtype.itemsize == 2]:
            logger.warning(
                "A_log and dt_bias of %d layers (%s, ...) were loaded in 16 bits and "
                "are fp32 from here on, with the rounded values. Load within "
                "megatron_gdn.hf.gates_in_fp32() to keep the file's values.",
                len(rounded),
                rounded[0],
            )

    def _wrap_forward(self, text: TextModel, gathers: bool) -> None:
        """Find documents before each forward of ``text``; ``gathers``: as in
        :meth:`__init__`."""
        names = tuple(inspect.signature(type(text).forward).parameters)[1:]
        before_patch = text.config._attn_implementation

        @torch.compiler.disable  # the host reads boundaries
        def prepare(module: Any, arguments: Keywords) -> Keywords:
            """The arguments of the model's forward, with documents and padding
            resolved."""
            options = next(linear_attentions(module)).drop_in.options
            config = module.config
            if gathers and config._attn_implementation in (GATHERED, before_patch):
                alone = group_of(options.cp_mesh) is None
                if alone:
                    config._attn_implementation = before_patch
                else:
                    config._attn_implementation = GATHERED
            return prepare_forward(module, options, arguments)

        @wraps(type(text).forward)
        def forward(module: nn.Module, *args: object, **kwargs: object) -> object:
            arguments = cast(Any, prepare)(
                module, dict(zip(names, args, strict=False)) | kwargs
            )
            wrapped = vars(module)[_FORWARD_BEFORE] or MethodType(
                type(module).forward, module
            )
            return wrapped(**arguments)

        if gathers:
            self._changes.callback(
                setattr, text.config, "_attn_implementation", before_patch
            )
        for layer in text.layers:
            if not any(linear_attentions(layer)):
                hook = layer.register_forward_pre_hook(
                    _drop_resolved_batch, with_kwargs=True
                )
                self._changes.callback(hook.remove)
        slot = forward_name(text)
        vars(text)[_FORWARD_BEFORE] = vars(text).get(slot)
        # deepcopy binds a method to the copy
        vars(text)[slot] = MethodType(forward, text)
        self._forwards[text] = forward
        self._changes.callback(_restore_forward, text)


def _restore_forward(text: TextModel) -> None:
    """Remove the wrapper of ``text.forward``."""
    slot = forward_name(text)
    wrapped = vars(text).pop(_FORWARD_BEFORE)
    if wrapped is None and slot == "forward":
        del vars(text)["forward"]
    else:
        vars(text)[slot] = wrapped or MethodType(type(text).forward, text)


def _drop_resolved_batch(layer: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Pre-hook: drop ``gdn_batch``, an argument that transformers' own attention does
    not have."""
    if layer.self_attn.config._attn_implementation != GATHERED:
        kwargs.pop("gdn_batch", None)
    return args, kwargs


def prepare_forward(
    text: TextModel, options: DropInOptions, kwargs: Keywords
) -> Keywords:
    """Add ``gdn_batch`` (documents, padding) and masks to the text model's
    ``kwargs``."""
    kwargs.pop("gdn_batch", None)
    mask = kwargs.get("attention_mask")
    one_rank = group_of(options.cp_mesh) is None
    of_linear = mask
    others = {}
    if one_rank:
        of_linear, others = split_masks(mask)
    elif isinstance(mask, dict):
        of_linear = mask.get("linear_attention")
    read = {kind: other for kind, other in others.items() if isinstance(other, Tensor)}
    sources = Sources.from_keywords(of_linear, kwargs)._replace(other_masks=read)
    x = kwargs.get("input_ids")
    cache = cache_in(kwargs)
    if x is None:
        x = kwargs.get("inputs_embeds")
    if x is None:  # no input, so the model's forward will raise an error
        return kwargs
    batch = cast(Any, resolve_batch)(
        options, sources, x, cache, bool(kwargs.get("use_cache"))
    )
    _refuse_unread_cache(text, kwargs)
    if batch is None:
        return kwargs
    kwargs["gdn_batch"] = batch
    if _has_four_dimensions(of_linear):
        of_linear = None  # ``batch`` has the mask's documents and padding
    if one_rank:
        kwargs["attention_mask"] = of_linear
        if isinstance(mask, dict):
            kwargs["attention_mask"] = {**mask, "linear_attention": of_linear}
    if batch.is_plain:
        return kwargs
    kwargs["use_cache"] = False
    if kwargs.get("position_ids") is None:
        positions = to_device(batch.positions.contiguous(), x.device)
        kwargs["position_ids"] = positions.expand(len(x), -1)
    refuse_modules_that_mix(text.config, batch.kind)
    masks: Keywords = {"linear_attention": None}
    for kind in set(text.config.layer_types) - {"linear_attention"}:
        if _is_for_the_callers_attention(mask, kind, batch, others.get(kind)):
            masks[kind] = cast(Any, mask)[kind]
        else:
            masks[kind] = _attention_mask(text, batch, x, kwargs["position_ids"])
    kwargs["attention_mask"] = masks
    return kwargs


def _refuse_unread_cache(text: TextModel, kwargs: Keywords) -> None:
    """Raise if ``kwargs`` name the cache as only transformers 5.24 and later versions
    do."""
    known = inspect.signature(type(text).forward).parameters
    if kwargs.get("cache") is not None and "cache" not in known:
        raise ValueError(
            f"cache= is the name of transformers 5.24; the installed version's "
            f"{type(text).__name__} would ignore it. Pass the cache as past_key_values."
        )


def _is_for_the_callers_attention(
    mask: object, kind: str, batch: ModelBatch, read: object
) -> bool:
    """Whether ``mask[kind]`` is passed on with packed documents, and not made from
    them.

    ``read`` is that entry as the documents were read from it. On one rank it is passed
    on if it is no mask that is known here, under context parallelism always.
    """
    if not isinstance(mask, dict) or kind not in mask:
        return False
    return batch.share.group is not None or not (
        read is None or isinstance(read, Tensor)
    )


def _has_four_dimensions(mask: object) -> bool:
    return isinstance(mask, Tensor) and mask.dim() == 4


def _attention_mask(
    text: TextModel, batch: ModelBatch, x: Tensor, position_ids: Tensor
) -> Any:
    """The mask that keeps documents apart; None if attention reads positions or
    ``batch``."""
    implementation = text.config._attn_implementation
    if batch.share.group is not None:
        if batch.share.documents is not None and implementation != GATHERED:
            raise ValueError(
                "documents are packed and the model's attention is "
                f"{implementation!r}, which does not take them under context "
                "parallelism. Patch with attention='gathered', or pass attention_mask "
                "as a dict whose 'full_attention' is what your attention takes."
            )
        return None
    assert batch.ids is not None
    # flash attention finds the documents of one row by positions
    if "flash" in implementation:
        positions = text_positions(position_ids)
        starts = batch.ids.diff(dim=-1) != 0
        positions_restart = positions is not None and bool(
            ((positions.cpu().diff(dim=-1) != 1) == starts).all()
        )
        if len(batch.ids) > 1 or batch.keep is not None or not positions_restart:
            raise ValueError(
                f"{implementation!r} keeps packed documents apart only in one row "
                "without padding whose position_ids start again at every document. Lay "
                "the rows end to end (megatron_gdn.hf.PackingCollator does), or use "
                "attn_implementation='sdpa'."
            )
        return None
    from transformers.masking_utils import (
        create_causal_mask,
        packed_sequence_mask_function,
    )

    weight = text.get_input_embeddings().weight
    no_cache: Keywords = {cache_parameter(create_causal_mask): None}
    return create_causal_mask(
        **no_cache,
        config=text.config,
        inputs_embeds=torch.empty(
            x.shape[:2] + (1,), dtype=weight.dtype, device=x.device
        ),
        attention_mask=batch.keep,
        and_mask_function=packed_sequence_mask_function(to_device(batch.ids, x.device)),
    )


def gathered_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    dropout: float = 0.0,
    gdn_batch: ModelBatch | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Causal attention of ``query [B, H, s, D]``, as ``[B, s, H, D]``; ``scaling``
    scales q . k."""
    if attention_mask is not None or gdn_batch is None:
        raise ValueError(
            f"{GATHERED!r} attention runs inside a model that megatron_gdn.hf.patch "
            "has patched for context parallelism, and takes no attention_mask."
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    k, v = (gdn_batch.share.gather(x.transpose(0, 1)) for x in (k, v))
    attended = []
    for document in gdn_batch.share.local_documents:
        q_BHsD = q[:, document.first_row : document.end_row].transpose(1, 2)
        k_BGSD, v_BGSD = (document.keys(x).permute(1, 2, 0, 3) for x in (k, v))
        mask = document.mask(q.device)
        out = F.scaled_dot_product_attention(
            q_BHsD,
            k_BGSD,
            v_BGSD,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=q_BHsD.shape[1] != k_BGSD.shape[1],
        )
        attended.append(out.transpose(1, 2))
    return torch.cat(attended, dim=1).contiguous(), None
