"""A stand-in for Transformer Engine on the CPU: ``install()``, before Megatron is
imported, puts plain torch modules under its names; others are classes that say so when
they are called."""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Others are not found: Megatron goes on without them, as with an older Transformer
# Engine.
MODULES = {
    "transformer_engine",
    *(f"transformer_engine.{name}" for name in ("common", "common.recipe", "pytorch")),
    *(
        f"transformer_engine.pytorch.{name}"
        for name in ("distributed", "fp8", "ops", "tensor")
    ),
}


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    return (x32 * (x32.square().mean(-1, keepdim=True) + eps).rsqrt()).to(
        x.dtype
    ) * weight


class RMSNorm(nn.Module):
    def __init__(
        self,
        normalized_shape=None,
        hidden_size=None,
        eps=1e-5,
        zero_centered_gamma=False,
        params_dtype=None,
        **_,
    ):
        super().__init__()
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        first = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = nn.Parameter(
            first(hidden_size or normalized_shape, dtype=params_dtype)
        )

    def forward(self, x: Tensor) -> Tensor:
        return _rms_norm(x, self.weight + int(self.zero_centered_gamma), self.eps)


class _Base(nn.Module):
    """What Megatron's wrappers call on every module of Transformer Engine."""

    def __init__(
        self, out_features, in_features, bias, params_dtype, init_method, return_bias
    ):
        super().__init__()
        self.out_features = out_features
        self.in_features = in_features
        self.use_bias = bias
        self.te_returns_bias = return_bias
        self.tp_size = 1
        self.parallel_mode = None  # as that of a linear that every rank holds whole
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, dtype=params_dtype)
        )
        if init_method is not None:
            init_method(self.weight)
        self.bias = (
            nn.Parameter(torch.zeros(out_features, dtype=params_dtype))
            if bias
            else None
        )

    def set_tensor_parallel_group(self, group) -> None:
        self.tp_group = group

    def _linear(self, x: Tensor):
        if self.te_returns_bias:
            return F.linear(x, self.weight), self.bias
        return F.linear(x, self.weight, self.bias)


class Linear(_Base):
    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        params_dtype=None,
        init_method=None,
        return_bias=False,
        tp_size=1,
        **_,
    ):
        _require_one(tp_size)
        super().__init__(
            out_features, in_features, bias, params_dtype, init_method, return_bias
        )

    def forward(self, x: Tensor, is_first_microbatch=None, **_):
        return self._linear(x)


class LayerNormLinear(_Base):
    def __init__(
        self,
        in_features,
        out_features,
        eps=1e-5,
        bias=True,
        normalization="LayerNorm",
        params_dtype=None,
        init_method=None,
        return_bias=False,
        tp_size=1,
        zero_centered_gamma=False,
        **_,
    ):
        _require_one(tp_size)
        assert normalization == "RMSNorm", normalization
        super().__init__(
            out_features, in_features, bias, params_dtype, init_method, return_bias
        )
        self.eps = eps
        self.zero_centered = zero_centered_gamma
        first = torch.zeros if zero_centered_gamma else torch.ones
        self.layer_norm_weight = nn.Parameter(first(in_features, dtype=params_dtype))
        # low-rank adapters ask for the normed rows
        self.return_layernorm_output = False

    def forward(self, x: Tensor, is_first_microbatch=None, **_):
        normed = _rms_norm(
            x, self.layer_norm_weight + int(self.zero_centered), self.eps
        )
        y = self._linear(normed)
        if not self.return_layernorm_output:
            return y
        return (*y, normed) if isinstance(y, tuple) else (y, normed)


class GroupedLinear(nn.Module):
    """One matrix per expert: the first ``m_splits[0]`` rows times ``weight0``, and so
    on."""

    def __init__(
        self,
        num_gemms,
        in_features,
        out_features,
        bias=True,
        params_dtype=None,
        init_method=None,
        tp_size=1,
        **_,
    ):
        _require_one(tp_size)
        super().__init__()
        assert not bias
        self.num_gemms = num_gemms
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = False
        self.tp_size = 1
        for i in range(num_gemms):
            weight = nn.Parameter(
                torch.empty(out_features, in_features, dtype=params_dtype)
            )
            if init_method is not None:
                init_method(weight)
            setattr(self, f"weight{i}", weight)

    def forward(self, x: Tensor, m_splits, is_first_microbatch=None, **_):
        rows = x.split([int(number) for number in m_splits])
        return torch.cat(
            [F.linear(y, getattr(self, f"weight{i}")) for i, y in enumerate(rows)]
        )


class DotProductAttention(nn.Module):
    """Causal attention within each document: [s, b, heads, k] or packed [t, heads,
    k]."""

    def __init__(
        self, num_attention_heads, kv_channels, softmax_scale=None, **settings
    ):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.kv_channels = kv_channels
        self.softmax_scale, self.qkv_format = (
            softmax_scale,
            settings.get("qkv_format", "sbhd"),
        )
        self.cp_group = self.cp_global_ranks = self.cp_stream = None

    def forward(
        self, query, key, value, attention_mask=None, *, qkv_format=None, **settings
    ):
        packed = (qkv_format or self.qkv_format) == "thd"
        if packed:
            ends = settings.get("cu_seqlens_q_padded")  # padding is at a document's end
            ends = (settings["cu_seqlens_q"] if ends is None else ends).tolist()
            lengths = [end - begin for begin, end in zip(ends, ends[1:], strict=False)]
            rows = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
            return torch.cat(
                [self._attend(*(x[:, None] for x in row))[:, 0] for row in rows]
            )
        return self._attend(query, key, value)

    def _attend(self, query, key, value) -> Tensor:
        mixed = F.scaled_dot_product_attention(
            *(x.permute(1, 2, 0, 3) for x in (query, key, value)),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=True,
        )
        return mixed.permute(2, 0, 1, 3).flatten(2)


def _require_one(tp_size: int) -> None:
    if tp_size != 1:
        raise NotImplementedError(
            "the stand-in for Transformer Engine has tensor parallel size 1"
        )


class _Absent(type):
    """A class that exists to be named, subclassed and asked isinstance of; not to be
    called."""

    def __call__(cls, *args, **kwargs):
        raise NotImplementedError(
            f"{cls.__name__} is not in the stand-in for Transformer Engine"
        )

    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        # a state that is asked for, such as "is fp8 on"
        return lambda *args, **kwargs: None


FUNCTIONS = {
    "activation_recompute_forward",
    "checkpoint",
    "fp8_autocast",
    "fp8_model_init",
    "is_fp8_activation_recompute_enabled",
}
HERE = {
    cls.__name__: cls
    for cls in (RMSNorm, Linear, LayerNormLinear, GroupedLinear, DotProductAttention)
}


class _Names(ModuleType):
    __version__ = "2.4.0"
    __path__ = []

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if name in HERE:
            return HERE[name]
        if f"{self.__name__}.{name}" in MODULES:
            return import_module(f"{self.__name__}.{name}")
        if name[0].islower() and name not in FUNCTIONS:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return _Absent(name, (nn.Module,), {})


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname in MODULES:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Names(spec.name)

    def exec_module(self, module) -> None:
        pass


def installed() -> bool:
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def install() -> None:
    assert "megatron.core" not in sys.modules, (
        "before Megatron, which asks once what is there"
    )
    sys.meta_path.insert(0, _Finder())
