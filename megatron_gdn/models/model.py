"""A published model: its sizes, Megatron configuration, spec, flags and legal parallel
sizes."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..gdn.sizes import GDNDims
from ..hf.model_map import HFModelConfig, parse_hf_config
from ..kda.sizes import KDADims
from ..mamba2.sizes import Mamba2Dims
from ..mixers.options import RECOMPUTE_LEVELS
from .stack import CHUNK, MAMBA_EXPAND, MAMBA_TAPS, Stack


@dataclass(frozen=True)
class Model:
    """A published model."""

    name: str
    architecture: str  # its class in transformers
    fields: dict[str, object]  # of its ``config.json``
    source: str  # the file or page from which the fields were copied

    @cached_property
    def hf(self) -> HFModelConfig:
        """The parsed config, for `build_model`, `transformer_config` and
        `megatron_flags`."""
        config = {"architectures": [self.architecture]} | self.fields
        return parse_hf_config(config, f"{self.name} in catalogue.toml")

    @property
    def pattern(self) -> str:
        """Layer symbols: 'G' Gated DeltaNet, 'K' Kimi Delta Attention, 'M' Mamba2, '*'
        attention, '+' latent attention, '-' MLP, 'E' experts."""
        return self.hf.hybrid_layer_pattern

    @cached_property
    def stack(self) -> Stack:
        """The model's layers with their parameters, FLOPs and bytes of states."""
        config = SimpleNamespace(**self.hf.megatron_settings("hybrid"))
        return Stack.of(
            config,
            self.pattern,
            self.hf.vocab_size,
            self.hf.tied,
            kda=self.hf.kda_options,
        )

    @cached_property
    def dims(self) -> GDNDims | KDADims | Mamba2Dims:
        """The sizes of one recurrent layer, not split over ranks."""
        if "G" in self.pattern:
            return self.hf.gdn
        if "K" in self.pattern:
            return self.hf.kda
        sizes = self.hf.sizes
        return Mamba2Dims.from_config(
            sizes, sizes.hidden_size, MAMBA_TAPS, MAMBA_EXPAND
        )

    def tensor_parallel_sizes(self) -> list[int]:
        """The legal tensor-parallel sizes: those that divide the heads of all layers and
        the width of MLPs and shared experts. Routed experts are not split."""
        sizes = self.hf.sizes
        # head_counts has pairs (kind of heads, number). The last kind are the key
        # heads, in Mamba2 the groups; their number divides the number of value heads.
        key_heads = self.dims.layout.head_counts[-1][1]
        heads = sizes.num_attention_heads
        groups = getattr(sizes, "num_query_groups", heads)
        split_sizes = [heads, key_heads]
        if "-" in self.pattern:
            split_sizes.append(sizes.ffn_hidden_size)
        if "E" in self.pattern:
            split_sizes.append(sizes.moe_shared_expert_intermediate_size)
        legal = []
        for tp in range(1, heads + 1):
            # ranks split the query groups, or several ranks have the same group
            fits_groups = groups % tp == 0 or tp % groups == 0
            if fits_groups and all(size % tp == 0 for size in split_sizes):
                legal.append(tp)
        return legal

    def headwise_sizes(self, tp: int) -> list[int]:
        """The context-parallel sizes at which ``headwise`` can split the heads that a
        rank has with tensor-parallel size ``tp``."""
        layout = self.dims.shard(tp).layout
        return [
            cp for cp in range(1, layout.state_heads + 1) if layout.shares_among(cp)
        ]

    def expert_parallel_sizes(self) -> list[int]:
        """The legal expert-parallel sizes: divisors of the number of experts."""
        experts = getattr(self.hf.sizes, "num_moe_experts", 1)
        return [n for n in range(1, experts + 1) if experts % n == 0]

    def refuse_illegal_sizes(self, tp: int, cp: int, ep: int, length: int) -> None:
        """Raise a ValueError if a launch would refuse one of the parallel sizes, or
        sequences of ``length`` tokens. The error names the legal sizes."""
        _require_legal_size("tensor-parallel size tp", tp, self.tensor_parallel_sizes())
        _require_legal_size("expert-parallel size ep", ep, self.expert_parallel_sizes())
        if cp < 1:
            raise ValueError(f"context-parallel size cp={cp} must be at least 1.")
        fragments_per_rank = 1
        if cp > 1:
            fragments_per_rank = 2
        multiple = cp * lcm(fragments_per_rank, tp)
        if length < 1 or length % multiple:
            nearest = max(round(length / multiple), 1) * multiple
            raise ValueError(
                f"length={length} must be a positive multiple of {multiple}, such as "
                f"{nearest}, for tp={tp} and cp={cp}: zigzag cuts a sequence into 2 cp "
                "fragments, and sequence parallelism cuts each rank's share by tp."
            )

    def saved_bytes(self, tp: int = 1, recompute: str = "none") -> int:
        """Bytes per token that a Gated DeltaNet saves for its backward on one of ``tp``
        tensor-parallel ranks.

        The number holds for bf16 with sequence parallelism, and for the rules flash_qla
        and fla. ``recompute`` is the layer's option, or ``"layer"`` for
        ``--recompute-modules gdn`` of Megatron's dev branch. The rule flash_qla also
        saves states of long sequences (16 MiB for 32768 tokens of 32 heads), which are
        not counted.
        """
        dims: Any = self.dims.shard(tp)
        # in_proj's input; under sequence parallelism a rank has 1 / tp of it
        saved = 2 * dims.hidden_size // tp
        if recompute == "layer":
            return saved
        recomputed = RECOMPUTE_LEVELS[recompute]
        saved += 2 * dims.layout.width  # in_proj's output
        if "rule" not in recomputed:
            saved += 2 * dims.v_dim  # the rule's output
            # One row of the chunk's triangular inverse in bf16; cumulative g and beta
            # in fp32.
            saved += dims.num_value_heads * (2 * CHUNK + 2 * 4)
        if "qkv" not in recomputed:
            # k and v; the backward always computes q again.
            saved += 2 * (dims.qk_dim + dims.v_dim)
        if "norm_out" not in recomputed:
            saved += 2 * dims.v_dim  # out_proj's input
        return saved


def _require_legal_size(name: str, size: int, legal: list[int]) -> None:
    """Raise a ValueError if the parallel size ``name`` is not one of ``legal``."""
    if size not in legal:
        sizes = ", ".join(map(str, legal))
        raise ValueError(f"{name}={size} is not legal; use one of {sizes}.")


def _read_catalogue() -> dict[str, Model]:
    """Name -> model, of the models in ``catalogue.toml``."""
    file = Path(__file__).with_name("catalogue.toml")
    catalogue = tomllib.loads(file.read_text(encoding="utf-8"))
    # A model inherits the fields of the entry that its key `like` names: a shared table
    # or an earlier model.
    fields_by_name = catalogue["shared"]
    models = {}
    for name, fields in catalogue["models"].items():
        architecture = fields.pop("architecture")
        source = fields.pop("source")
        inherited = fields_by_name.get(fields.pop("like", None), {})
        fields_by_name[name] = inherited | fields
        models[name] = Model(name, architecture, fields_by_name[name], source)
    return models


ENTRIES = _read_catalogue()


def find(name: str) -> Model:
    """The model ``name``, in upper or lower case; an unknown name raises a
    ValueError."""
    for known, model in ENTRIES.items():
        if known.lower() == name.lower():
            return model
    raise ValueError(f"unknown model {name!r}; known: {', '.join(ENTRIES)}.")
