"""Replace the linear-attention modules of a transformers model, in place, and undo it."""

from __future__ import annotations

import inspect
import logging
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from types import MethodType
from typing import Any, cast

import torch
from torch import nn

from ...context_parallel import LinearCpMode, SequenceLayout
from .families import MODELS, linear_attention_of, linear_attentions, transformers_class
from .gates import gate_owner
from .layer import CPAwareGatedDeltaNet, DropInOptions, become_drop_in, stop_being_drop_in
from .model_forward import GATHERED, prepare_forward, register_gathered_attention
from .place import group_of

# On a patched text model: the forward that another tool had put on the object, or None.
_FORWARD_BEFORE = "_megatron_gdn_forward_before"

logger = logging.getLogger(__name__)


class Patch(AbstractContextManager):
    """A model whose linear-attention modules were replaced; ``layers`` are these, by name."""

    def __init__(self, model: nn.Module, options: DropInOptions, attention: str | None) -> None:
        self.model = model
        self.layers: dict[str, CPAwareGatedDeltaNet] = {}
        self._changes = ExitStack()  # what undoes them
        self._forwards: dict[nn.Module, Any] = {}
        texts = {name: cast(Any, one) for name, one in model.named_modules() if _is_text_model(one)}
        if not texts:
            raise ValueError(
                f"{type(model).__name__} has no linear-attention modules that are known here: "
                f"legal are transformers' {MODELS} models and their text models."
            )
        for text in texts.values():
            for name, layer in text.named_modules():
                if isinstance(layer, CPAwareGatedDeltaNet):
                    raise ValueError(
                        f"{name} is replaced already; undo the first patch before another one."
                    )
        try:
            for prefix, text in texts.items():
                self._replace(prefix, text, options)
                self._hook(text, attention)
        except Exception:
            self.undo()
            raise

    def __repr__(self) -> str:
        """What was replaced, in one line."""
        if not self.layers:
            return f"Patch of {type(self.model).__name__}: undone"
        first, layer = next(iter(self.layers.items()))
        count, options = len(self.layers), layer.drop_in.options
        group = group_of(options.cp_mesh)
        ranks = "one rank" if group is None else f"{group.size()} context-parallel ranks"
        runs = "every batch runs this package's mixer"
        if group is None and options.unpacked == "transformers":
            runs = "packed batches run this package's mixer, others transformers' own forward"
        return (
            f"Patch of {type(self.model).__name__}: {count} linear-attention modules ({first} is "
            f"the first) on {ranks}; {runs}"
        )

    def undo(self) -> None:
        """Put back transformers' own classes and the dtypes of ``A_log`` and ``dt_bias``.

        Raises:
            RuntimeError: the modules have been wrapped meanwhile, as by ``fully_shard``, or a text
                model's ``forward`` replaced.
        """
        for name, layer in self.layers.items():
            mine = type(layer).__mro__[1] is CPAwareGatedDeltaNet
            if not mine or type(gate_owner(layer)._gates).__name__ != "SSMGate":
                raise RuntimeError(
                    f"{name} has become a {type(layer).__name__} since it was replaced (sharded?), "
                    f"so the patch cannot be undone. Undo it before wrapping the model."
                )
        for text, forward in self._forwards.items():
            if getattr(vars(text).get("forward"), "__func__", None) is not forward:
                raise RuntimeError(
                    f"the forward of {type(text).__name__} was replaced since it was patched, and "
                    f"calls the patched one. Restore that before undoing the patch."
                )
        self._changes.close()
        self._forwards, self.layers = {}, {}

    def __exit__(self, *_: Any) -> None:
        self.undo()

    def _replace(self, prefix: str, text: Any, options: DropInOptions) -> None:
        rounded = []
        for name, module in text.named_modules(prefix=prefix):
            if transformers_class(module) is None:
                continue
            layer = self.layers[name] = become_drop_in(module, text.config, options)
            self._changes.callback(stop_being_drop_in, layer)
            if layer.drop_in.stored["A_log"] in (torch.bfloat16, torch.float16):
                rounded.append(name)
        if rounded:
            logger.warning(
                "A_log and dt_bias of %d layers (%s, ...) were loaded in 16 bits and are fp32 from "
                "here on, with the rounded values. Load within megatron_gdn.hf.gates_in_fp32() to "
                "keep the file's values.",
                *(len(rounded), rounded[0]),
            )

    def _hook(self, text: Any, attention: str | None) -> None:
        names = tuple(inspect.signature(type(text).forward).parameters)[1:]
        own = text.config._attn_implementation

        def options_now(module: Any) -> DropInOptions:
            options = _options_of(module)
            if attention is not None:
                off = group_of(options.cp_mesh) is None
                old, new = (attention, own) if off else (own, attention)
                if module.config._attn_implementation == old:
                    module.config._attn_implementation = new
            return options

        @torch.compiler.disable  # reads boundaries on the host
        def before(module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            return (), prepare_forward(module, options_now(module), given)

        @wraps(type(text).forward)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if "gdn_batch" not in kwargs:  # called directly, so that the hook did not run
                args, kwargs = cast(Any, before)(module, args, kwargs)
            own = vars(module)[_FORWARD_BEFORE] or MethodType(type(module).forward, module)
            return own(*args, **kwargs)

        if attention is not None:
            self._changes.callback(setattr, text.config, "_attn_implementation", own)
        options_now(text)
        hooks = [text.register_forward_pre_hook(cast(Any, before), with_kwargs=True)]
        for layer in text.layers:
            if linear_attention_of(layer) is None:
                hooks.append(layer.register_forward_pre_hook(_before_attention, with_kwargs=True))
        for hook in hooks:
            self._changes.callback(hook.remove)
        vars(text)[_FORWARD_BEFORE] = vars(text).get("forward")
        vars(text)["forward"] = MethodType(forward, text)  # a deepcopy binds it to the copy
        self._forwards[text] = forward
        self._changes.callback(_restore_forward, text)


def _restore_forward(text: Any) -> None:
    before = vars(text).pop(_FORWARD_BEFORE)
    del vars(text)["forward"]
    if before is not None:
        vars(text)["forward"] = before


def _options_of(text: Any) -> DropInOptions:
    """The options of a text model's replaced layers; their ``_cp_mesh`` may have changed."""
    first, *others = (module.drop_in.options for module in linear_attentions(text))
    for options in others:
        mine, theirs = first.cp_mesh, options.cp_mesh
        if theirs is not mine and group_of(theirs) is not group_of(mine):
            raise ValueError(
                f"the layers of {type(text).__name__} are set to different context-parallel ranks, "
                f"{mine} and {theirs}. Set _cp_mesh of all of them to one mesh, or to None."
            )
    return first


def _before_attention(layer: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Drop the resolved batch, which transformers' own attention does not take."""
    if layer.self_attn.config._attn_implementation != GATHERED:
        kwargs.pop("gdn_batch", None)
    return args, kwargs


def _is_text_model(module: nn.Module) -> bool:
    """Whether its ``layers`` hold linear-attention modules."""
    layers = getattr(module, "layers", None)
    return isinstance(layers, nn.ModuleList) and any(linear_attentions(module))


def patch(
    model: nn.Module,
    cp_mesh: Any = None,
    *,
    cp_layout: str | SequenceLayout = SequenceLayout.ZIGZAG_BUFFER,
    linear_cp_mode: str | LinearCpMode | None = None,
    backend: str = "auto",
    rule_operands: str = "fp16",
    unpacked: str = "transformers",
    recompute_qkv: bool = False,
    attention: str | None = None,
) -> Patch:
    """Let every linear-attention module of a transformers model run by this package, in place.

    For Qwen3-Next, Qwen3.5, Qwen3.5-MoE, Qwen4-Exp, OLMo Hybrid, Kimi Linear, GLM 5 next and
    Bailing Hybrid, also inside their vision-language classes. Modules, parameters, state-dict keys
    and optimizers stay; ``A_log`` and ``dt_bias`` become fp32.

    Packed documents are read once per forward from the model's arguments, see :mod:`.sources`, and
    kept apart. With context parallelism the model is given this rank's tokens, ``cu_seq_lens_q`` of
    the whole buffer or this rank's ids, and optionally ``seq_index [s]``, the positions of its
    tokens. Parameters get the gradient of this rank's tokens: sum it over ``cp_mesh``.

    Args:
        model: any model of these families, or its text model.
        cp_mesh: one-dimensional device mesh over the context-parallel ranks.
        cp_layout: how sequences are cut, if there is no ``seq_index``: ``"zigzag_buffer"``
            (DualChunkSwap of the whole row), ``"contiguous"``, or ``"zigzag"`` (of every document).
        linear_cp_mode: ``"headwise"``, ``"chunkwise"`` (states travel) or ``"auto"``.
        backend, rule_operands, recompute_qkv: as in :class:`megatron_gdn.GatedDeltaNet`; for Kimi
            Delta Attentions the first alone.
        unpacked: what runs a batch that is not packed on one rank: ``"transformers"``, its own
            forward with its bits, or ``"fused"``, the mixer of this package.
        attention: ``"gathered"`` lets the model's softmax attention run under context parallelism
            too: every rank gathers keys and values, packed documents included. None leaves it to
            the caller (torch's ``context_parallel``, ring attention), without packed documents.

    Returns:
        a handle with ``undo()``, also a context manager. Its ``repr`` says what was replaced.

    Raises:
        ValueError: a model without such modules or patched already; an option that does not fit.
    """
    if attention not in (None, "gathered"):
        raise ValueError(f"attention={attention!r} is not known; use 'gathered' or None.")
    options = DropInOptions(
        cp_mesh=cp_mesh, cp_layout=cp_layout, linear_cp_mode=linear_cp_mode, backend=backend,
        rule_operands=rule_operands, unpacked=unpacked, recompute_qkv=recompute_qkv,
    )  # fmt: skip
    if attention is not None:
        register_gathered_attention()
    patched = Patch(model, options, None if attention is None else GATHERED)
    logger.info("%s", patched)
    return patched
