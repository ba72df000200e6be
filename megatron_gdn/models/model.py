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
from .stack import CHUNK, MAMBA_TAPS, Stack


@dataclass(frozen=True)
class Model:
    """A published model, from its class in transformers and the fields of its
    ``config.json``."""

    name: str
    architecture: str
    fields: dict[str, object]
    source: str  # the file or page that the fields were copied from

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
        if "G" in self.pattern:
            return self.hf.gdn
        if "K" in self.pattern:
            return self.hf.kda
        config = self.hf.sizes
        return Mamba2Dims.from_config(config, config.hidden_size, MAMBA_TAPS, 2)

    def tensor_parallel_sizes(self) -> list[int]:
        """Tensor-parallel sizes that divide the heads and the MLP width; experts are
        not split."""
        # groups in Mamba2
        sizes = self.hf.sizes
        key_heads = self.dims.layout.counts[-1][1]
        heads = sizes.num_attention_heads
        groups = getattr(sizes, "num_query_groups", heads)
        cut = [heads, key_heads]
        if "-" in self.pattern:
            cut.append(sizes.ffn_hidden_size)
        if "E" in self.pattern:
            cut.append(sizes.moe_shared_expert_intermediate_size)
        return [
            n
            for n in range(1, heads + 1)
            if all(whole % n == 0 for whole in cut)
            and (groups % n == 0 or n % groups == 0)
        ]

    def headwise_sizes(self, tp: int) -> list[int]:
        """Context-parallel sizes at which headwise can split a tensor-parallel rank's
        heads."""
        layout = self.dims.shard(tp).layout
        return [n for n in range(1, layout.state_heads + 1) if layout.shares_among(n)]

    def expert_parallel_sizes(self) -> list[int]:
        """The legal expert-parallel sizes: divisors of the number of experts."""
        experts = getattr(self.hf.sizes, "num_moe_experts", 1)
        return [n for n in range(1, experts + 1) if experts % n == 0]

    def refuse_illegal_sizes(self, tp: int, cp: int, ep: int, length: int) -> None:
        """Raise a ValueError, with the legal sizes, for sizes that a launch would
        refuse."""
        for name, value, legal in (
            ("tensor-parallel size tp", tp, self.tensor_parallel_sizes()),
            ("expert-parallel size ep", ep, self.expert_parallel_sizes()),
        ):
            if value not in legal:
                sizes = ", ".join(map(str, legal))
                raise ValueError(f"{name}={value} is not legal; use one of {sizes}.")
        if cp < 1:
            raise ValueError(f"context-parallel size cp={cp} must be at least 1.")
        multiple = cp * lcm(2 if cp > 1 else 1, tp)
        if length < 1 or length % multiple:
            near = max(round(length / multiple), 1) * multiple
            raise ValueError(
                f"length={length} must be a multiple of {multiple}, such as {near}, "
                f"for tp={tp} and cp={cp}: zigzag cuts a sequence into 2 cp pieces, "
                "and sequence parallelism cuts each rank's share by tp."
            )

    def saved_bytes(self, tp: int = 1, recompute: str = "none") -> int:
        """Bytes per token that a Gated DeltaNet keeps for its backward on a
        tensor-parallel rank.

        The count is for bf16, the rules flash_qla and fla, and sequence parallelism.
        ``recompute`` is the layer's option, or ``"layer"`` for
        ``--recompute-modules gdn`` of Megatron's dev branch. States that flash_qla
        saves for long sequences are not counted (16 MiB for 32768 tokens of 32 heads).
        """
        share: Any = self.dims.shard(tp)
        # in_proj's input, of which a rank saves its own tokens
        kept = 2 * share.hidden_size // tp
        if recompute == "layer":
            return kept
        recomputed = RECOMPUTE_LEVELS[recompute]
        kept += 2 * share.layout.width  # in_proj's output
        if "rule" not in recomputed:
            kept += 2 * share.v_dim  # the rule's output
            # One row of the chunk's triangular inverse in bf16; cumulative g and beta
            # in fp32.
            kept += share.num_value_heads * (2 * CHUNK + 2 * 4)
        if "qkv" not in recomputed:
            # k and v; the backward always computes q again.
            kept += 2 * (share.qk_dim + share.v_dim)
        if "norm_out" not in recomputed:
            kept += 2 * share.v_dim  # out_proj's input
        return kept


def _read_catalogue() -> dict[str, Model]:
    """The models of ``catalogue.toml`` by name."""
    tables = tomllib.loads(
        Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8")
    )
    known = tables["shared"]
    models = {}
    for name, own in tables["models"].items():
        architecture = own.pop("architecture")
        source = own.pop("source")
        known[name] = known.get(own.pop("like", None), {}) | own
        models[name] = Model(name, architecture, known[name], source)
    return models


ENTRIES = _read_catalogue()


def find(name: str) -> Model:
    """Find a model by name, ignoring case; an unknown name is a ValueError."""
    for known, model in ENTRIES.items():
        if known.lower() == name.lower():
            return model
    raise ValueError(f"unknown model {name!r}; known: {', '.join(ENTRIES)}.")
