"""Patch a transformers model: turn its linear-attention modules into drop-ins, in place.

The patched forward of the text model finds the documents of the batch once, for all
layers. Under context parallelism, ``attention="gathered"`` lets softmax attention
gather the keys and values of all ranks. This rank's queries then attend to them,
document by document.

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
from ...ops.autograd import uncompiled
from ...ops.host_tables import to_device
from .batch import ModelBatch, group_of, resolve_batch
from .families import (
    LEGAL_PACKAGES,
    cache_parameter,
    linear_attentions,
    refuse_unsupported_modules,
    transformers_class,
)
from .gates import gate_owner
from .layer import CPAwareGatedDeltaNet, DropInOptions, become_drop_in, undo_drop_in
from .sources import BoundarySources, find_cache, split_masks, text_positions

# A text model of transformers: the module with `layers`. Its attributes depend on its
# class.
TextModel = Any
# Keyword arguments of a forward.
Keywords = dict[str, Any]

# the name of `gathered_attention` in transformers' AttentionInterface
GATHERED_ATTENTION = "megatron_gdn_gathered"
# The attribute in which a patched text model keeps the forward that another tool had set
# on the instance; None if there was none.
_WRAPPED_FORWARD_NAME = "_megatron_gdn_forward_before"

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
    keeps their states apart. With context parallelism pass this rank's tokens. Pass
    packed documents as ``cu_seq_lens_q`` of the whole buffer or as this rank's document
    ids. ``seq_index [s]``, the positions of this rank's tokens, is optional. Each rank
    has the gradients of its own tokens: sum them over ``cp_mesh``.

    Args:
        model: any model of these families, or its text model.
        cp_mesh: one-dimensional device mesh over the context-parallel ranks.
        cp_layout: how sequences are cut, if there is no ``seq_index``:
            ``"zigzag_buffer"`` (DualChunkSwap of the whole row), ``"contiguous"``, or
            ``"zigzag"`` (of every document).
        linear_cp_mode: whether ranks exchange projection rows (``"headwise"``) or states
            (``"chunkwise"``); ``"auto"`` chooses.
        backend, rule_operands, recompute_qkv: as in
            :class:`megatron_gdn.GatedDeltaNet`; a Kimi Delta Attention takes only
            `backend`.
        unpacked: what runs a batch without packed documents on one rank:
            ``"transformers"`` for transformers' own forward, bit for bit, ``"fused"`` for
            this package's mixer.
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
    drop_in_options = DropInOptions.from_keywords(cp_mesh=cp_mesh, **options)
    if attention is not None:
        from transformers import AttentionInterface

        AttentionInterface.register(GATHERED_ATTENTION, gathered_attention)
    handle = Patch(model, drop_in_options, gathers_keys=attention is not None)
    logger.info("%s", handle)
    return handle


class Patch(AbstractContextManager):
    """The handle that undoes the patch of a model.

    ``layers``: name in ``model`` -> patched linear-attention module.
    """

    def __init__(
        self, model: nn.Module, options: DropInOptions, gathers_keys: bool
    ) -> None:
        """Patch ``model``. If ``gathers_keys``, softmax attention gathers the keys and
        values of all ranks."""
        self.model = model
        self.layers: dict[str, CPAwareGatedDeltaNet] = {}
        self._undo_callbacks = ExitStack()
        # text model -> the function that is its forward while it is patched
        self._forward_wrappers: dict[nn.Module, Any] = {}
        text_models: dict[str, TextModel] = {}
        for name, module in model.named_modules():
            has_layers = isinstance(getattr(module, "layers", None), nn.ModuleList)
            if has_layers and any(linear_attentions(module)):
                text_models[name] = module
        if not text_models:
            raise ValueError(
                f"{type(model).__name__} has no linear-attention modules that are "
                f"known here: legal are transformers' models of {LEGAL_PACKAGES}, and their "
                "text models."
            )
        for text in text_models.values():
            for name, module in text.named_modules():
                if isinstance(module, CPAwareGatedDeltaNet):
                    raise ValueError(
                        f"{name} is replaced already; undo the first patch before "
                        "another one."
                    )
        try:
            for prefix, text in text_models.items():
                self._replace_modules(prefix, text, options)
                self._wrap_forward(text, gathers_keys)
        except BaseException:
            self.undo()
            raise

    def __repr__(self) -> str:
        """A sentence for the log: the patched modules, the ranks and what runs."""
        name = type(self.model).__name__
        count = len(self.layers)
        if not count:
            return f"Patch of {name}: undone"
        first_name, layer = next(iter(self.layers.items()))
        options = layer.drop_in.options
        group = group_of(options.cp_mesh)
        if group is None:
            ranks = "one rank"
        else:
            ranks = f"{group.size()} context-parallel ranks"
        what_runs = "every batch runs this package's mixer"
        if group is None and options.unpacked == "transformers":
            what_runs = (
                "packed batches run this package's mixer, others transformers' own "
                "forward"
            )
        return (
            f"Patch of {name}: {count} linear-attention modules ({first_name} is the "
            f"first) on {ranks}; {what_runs}"
        )

    def undo(self) -> None:
        """Put back transformers' own classes and the dtypes of ``A_log`` and
        ``dt_bias``.

        Raises:
            RuntimeError: after the patch, a module was wrapped (for example by
                ``fully_shard``), or a text model's ``forward`` was replaced.
        """
        for name, layer in self.layers.items():
            # a wrapper such as `fully_shard` puts a class before the patch's class
            is_unwrapped = type(layer).__mro__[1] is CPAwareGatedDeltaNet
            if not is_unwrapped or gate_owner(layer)._gates_are_sharded:
                raise RuntimeError(
                    f"{name} has become a {type(layer).__name__} since it was replaced "
                    "(perhaps it was sharded), so the patch cannot be undone. Undo a "
                    "patch before wrapping the model."
                )
            if not runs_class_forward(layer):
                raise RuntimeError(
                    f"the forward of {name} was replaced since it was patched, and may "
                    "call the patched forward. Restore that forward before undoing the "
                    "patch."
                )
        for text, wrapper in self._forward_wrappers.items():
            bound = vars(text).get(forward_name(text))
            if getattr(bound, "__func__", None) is not wrapper:
                raise RuntimeError(
                    f"the forward of {type(text).__name__} was replaced since it was "
                    "patched, and may call the patched forward. Restore that forward "
                    "before undoing the patch."
                )
        self._undo_callbacks.close()
        self._forward_wrappers = {}
        self.layers = {}

    def __exit__(self, *_: object) -> None:
        self.undo()

    def _replace_modules(
        self, prefix: str, text: TextModel, options: DropInOptions
    ) -> None:
        """Turn the linear attentions of ``text`` into drop-ins; ``prefix``: the name of
        ``text`` in the model."""
        for name, module in text.named_modules(prefix=prefix):
            if transformers_class(module) is not None:
                layer = become_drop_in(module, text.config, options)
                self.layers[name] = layer
                self._undo_callbacks.callback(undo_drop_in, layer)
        rounded = []
        for name, layer in self.layers.items():
            if layer.drop_in.original_gate_dtypes["A_log"].itemsize == 2:
                rounded.append(name)
        if rounded:
            logger.warning(
                "A_log and dt_bias of %d layers (%s, ...) were loaded in 16 bits and "
                "are fp32 from here on, with the rounded values. Load within "
                "megatron_gdn.hf.gates_in_fp32() to keep the file's values.",
                len(rounded),
                rounded[0],
            )

    def _wrap_forward(self, text: TextModel, gathers_keys: bool) -> None:
        """Let :func:`prepare_forward` find the documents before each forward of ``text``;
        ``gathers_keys``: as in :meth:`__init__`."""
        # the names of the forward's arguments after self, for values given by position
        names = tuple(inspect.signature(type(text).forward).parameters)[1:]
        old_attention = text.config._attn_implementation

        @uncompiled  # the host reads boundaries
        def prepare(module: Any, arguments: Keywords) -> Keywords:
            """Choose the attention for the current mesh; return the ``arguments`` as
            :func:`prepare_forward` changes them. ``module``: the text model."""
            options = next(linear_attentions(module)).drop_in.options
            config = module.config
            # A third value was set by the user after the patch; it stays.
            may_choose = config._attn_implementation in (
                GATHERED_ATTENTION,
                old_attention,
            )
            if gathers_keys and may_choose:
                if group_of(options.cp_mesh) is None:
                    config._attn_implementation = old_attention
                else:
                    config._attn_implementation = GATHERED_ATTENTION
            return prepare_forward(module, options, arguments)

        @wraps(type(text).forward)
        def forward(module: nn.Module, *args: object, **kwargs: object) -> object:
            """Prepare the arguments, then call the forward that ``module`` had before
            the patch."""
            given = dict(zip(names, args, strict=False)) | kwargs
            arguments = prepare(module, given)
            wrapped = vars(module)[_WRAPPED_FORWARD_NAME]
            if wrapped is None:
                wrapped = MethodType(type(module).forward, module)
            return wrapped(**arguments)

        if gathers_keys:
            self._undo_callbacks.callback(
                setattr, text.config, "_attn_implementation", old_attention
            )
        for layer in text.layers:
            if not any(linear_attentions(layer)):
                hook = layer.register_forward_pre_hook(
                    _drop_resolved_batch, with_kwargs=True
                )
                self._undo_callbacks.callback(hook.remove)
        attribute = forward_name(text)
        vars(text)[_WRAPPED_FORWARD_NAME] = vars(text).get(attribute)
        # a bound method, which deepcopy of the model binds to the copy
        vars(text)[attribute] = MethodType(forward, text)
        self._forward_wrappers[text] = forward
        self._undo_callbacks.callback(_restore_forward, text)


def _restore_forward(text: TextModel) -> None:
    """Give ``text`` the forward that it had before `Patch._wrap_forward`.

    The stored forward is None if ``text`` had none of its own, only that of its class.
    Under accelerate's hooks the attribute is "_old_forward". The hooks call it, so it
    must stay, and gets the method of the class.
    """
    attribute = forward_name(text)
    wrapped = vars(text).pop(_WRAPPED_FORWARD_NAME)
    if wrapped is not None:
        vars(text)[attribute] = wrapped
    elif attribute == "forward":
        del vars(text)["forward"]
    else:
        vars(text)[attribute] = MethodType(type(text).forward, text)


def _drop_resolved_batch(layer: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Pre-hook of a layer with softmax attention: drop the argument ``gdn_batch``, which
    only :func:`gathered_attention` takes."""
    if layer.self_attn.config._attn_implementation != GATHERED_ATTENTION:
        kwargs.pop("gdn_batch", None)
    return args, kwargs


def prepare_forward(
    text: TextModel, options: DropInOptions, kwargs: Keywords
) -> Keywords:
    """The arguments with which the text model's own forward is called.

    ``kwargs``, the caller's arguments, are changed in place. They get ``gdn_batch``, the
    batch's documents and padding for all layers. If transformers' own linear attention
    cannot run the batch, they also get ``position_ids`` and a dict of masks, by kind of
    layer.
    """
    mask = kwargs.get("attention_mask")
    one_rank = group_of(options.cp_mesh) is None
    linear_mask = mask
    other_masks = {}
    if one_rank:
        linear_mask, other_masks = split_masks(mask)
    elif isinstance(mask, dict):
        linear_mask = mask.get("linear_attention")
    # only masks that are tensors are read
    tensor_masks = {
        kind: other for kind, other in other_masks.items() if isinstance(other, Tensor)
    }
    sources = BoundarySources.from_keywords(linear_mask, kwargs)
    sources = sources._replace(other_masks=tensor_masks)
    x = kwargs.get("input_ids")
    cache = find_cache(kwargs)
    if x is None:
        x = kwargs.get("inputs_embeds")
    if x is None:  # no input, so the model's forward will raise an error
        return kwargs
    fills_cache = bool(kwargs.get("use_cache"))
    batch = resolve_batch(options, sources, x, cache, fills_cache)
    _refuse_unread_cache(text, kwargs)
    if batch is None:
        return kwargs
    kwargs["gdn_batch"] = batch
    if _is_4d(linear_mask):
        linear_mask = None  # ``batch`` has the mask's documents and padding
    if one_rank:
        kwargs["attention_mask"] = linear_mask
        if isinstance(mask, dict):
            kwargs["attention_mask"] = {**mask, "linear_attention": linear_mask}
    if batch.is_plain:
        return kwargs
    kwargs["use_cache"] = False
    if kwargs.get("position_ids") is None:
        positions = to_device(batch.positions.contiguous(), x.device)
        kwargs["position_ids"] = positions.expand(len(x), -1)
    refuse_unsupported_modules(text.config, batch.unsupported_feature)
    masks: Keywords = {"linear_attention": None}
    for kind in set(text.config.layer_types) - {"linear_attention"}:
        if _keeps_callers_mask(mask, kind, batch, other_masks.get(kind)):
            masks[kind] = cast(Any, mask)[kind]
        else:
            masks[kind] = _mask_of_documents(text, batch, x, kwargs["position_ids"])
    kwargs["attention_mask"] = masks
    return kwargs


def _refuse_unread_cache(text: TextModel, kwargs: Keywords) -> None:
    """Raise a ValueError if the cache is given as ``cache=`` and ``text`` does not take
    this name of transformers 5.24: an older version would ignore the cache."""
    parameters = inspect.signature(type(text).forward).parameters
    if kwargs.get("cache") is not None and "cache" not in parameters:
        raise ValueError(
            f"cache= is the name of transformers 5.24; the installed version's "
            f"{type(text).__name__} would ignore it. Pass the cache as past_key_values."
        )


def _keeps_callers_mask(
    mask: object, kind: str, batch: ModelBatch, dense_mask: object
) -> bool:
    """Whether the layers of ``kind`` get the caller's ``mask[kind]``; otherwise they get
    a mask that is made from packed documents.

    ``dense_mask``: ``mask[kind]`` as :func:`.sources.split_masks` gives it. Under context
    parallelism the caller's mask is always kept. On one rank it is kept only if it is no
    tensor, since documents are read from a tensor.
    """
    if not isinstance(mask, dict) or kind not in mask:
        return False
    if batch.share.group is not None:
        return True
    return dense_mask is not None and not isinstance(dense_mask, Tensor)


def _is_4d(mask: object) -> bool:
    return isinstance(mask, Tensor) and mask.dim() == 4


def _mask_of_documents(
    text: TextModel, batch: ModelBatch, x: Tensor, position_ids: Tensor
) -> Any:
    """The mask of softmax attention that separates the documents of ``batch``; None if
    attention separates them by ``position_ids`` or reads ``batch`` itself.

    Under context parallelism ``batch.share.group`` is set, and the result is None.
    ``x``: token ids or embeddings of the batch.
    """
    implementation = text.config._attn_implementation
    if batch.share.group is not None:
        if batch.share.documents is not None and implementation != GATHERED_ATTENTION:
            raise ValueError(
                "documents are packed and the model's attention is "
                f"{implementation!r}, which does not take them under context "
                "parallelism. Patch with attention='gathered', or pass attention_mask "
                "as a dict whose 'full_attention' is what your attention takes."
            )
        return None
    assert batch.document_ids is not None
    # flash attention finds the documents of one row by positions
    if "flash" in implementation:
        positions = text_positions(position_ids)
        document_changes = batch.document_ids.diff(dim=-1) != 0
        positions_restart = False
        if positions is not None:
            jumps = positions.cpu().diff(dim=-1) != 1
            positions_restart = bool((jumps == document_changes).all())
        is_one_row = len(batch.document_ids) == 1
        if not is_one_row or batch.is_token is not None or not positions_restart:
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
        # only B, S, the dtype and the device of this tensor are read
        inputs_embeds=torch.empty(
            x.shape[:2] + (1,), dtype=weight.dtype, device=x.device
        ),
        attention_mask=batch.is_token,
        and_mask_function=packed_sequence_mask_function(
            to_device(batch.document_ids, x.device)
        ),
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
    """Causal attention over the keys of all ranks, as a function of transformers'
    AttentionInterface.

    ``query [B, H, s, D]``, ``key`` and ``value`` ``[B, G, s, D]`` are of this rank's
    tokens; ``scaling`` is the factor of q . k. ``gdn_batch``, which the patched text
    model passes, has the documents. Other keywords are not read.

    Returns the output ``[B, s, H, D]``, and None in place of attention weights.
    """
    if attention_mask is not None or gdn_batch is None:
        raise ValueError(
            f"{GATHERED_ATTENTION!r} attention runs inside a model that "
            "megatron_gdn.hf.patch has patched for context parallelism, and takes no "
            "attention_mask."
        )
    share = gdn_batch.share
    # keys and values of all ranks
    k_SBGD = share.gather(key.permute(2, 0, 1, 3))
    v_SBGD = share.gather(value.permute(2, 0, 1, 3))
    attended = []
    for document in share.local_documents:
        q_BHsD = query[:, :, document.first_row : document.end_row]
        k_BGSD = document.keys(k_SBGD).permute(1, 2, 0, 3)
        v_BGSD = document.keys(v_SBGD).permute(1, 2, 0, 3)
        # None if query i attends to the keys 0 to i
        mask = document.mask(query.device)
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
