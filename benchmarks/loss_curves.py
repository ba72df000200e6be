"""Loss curves of one small hybrid model with three layers: ours, megatron-core's,
transformers'.

    python benchmarks/run.py loss-curves    # docs/evidence.jsonl and docs/evidence.png

All start from the same random weights, read the same text in the same order and take
the same steps (AdamW, warm-up and cosine, clipped), in fp32 on the CPU. The weights
reach Megatron by `megatron_gdn.hf.load_hf_weights`. Rounding alone makes two runs part
after a while: a fourth curve, ours from weights that are off by one rounding, says how
far.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from lib.layers import start_megatron
from lib.session import Session

from megatron_gdn.hf import build_model, load_hf_weights

ROOT = Path(__file__).parents[1]
OURS = "megatron_gdn"
ROUNDED = "megatron_gdn, weights off by one rounding"
SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 4096,
}


def loss_curves(session: Session) -> None:
    row = session.row
    torch.set_num_threads(1)
    start_megatron()
    curves = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(1)
        config = transformers.Qwen3_5TextConfig(**SIZES, tie_word_embeddings=False)
        transformers_class()(config).save_pretrained(folder)
        for name, make in MODELS.items():
            curves[name] = losses(*make(folder), row)
            session.say(f"{name}: {curves[name][-1]:.4f}, at {session.seconds():.0f} s")
    record = {key: row[key] for key in ("steps", "rows", "tokens", "lr")}
    record |= {"device": "cpu", "versions": versions()}
    record |= {"date": datetime.date.today().isoformat(), "parting": parting(curves)}
    lines = [record]
    for step in range(row["steps"]):
        of_step = {name: values[step] for name, values in curves.items()}
        lines.append({"step": step + 1, **of_step})
    stem = Path(session.args.out or ROOT / "docs" / "evidence")
    text = "".join(json.dumps(line) + "\n" for line in lines)
    stem.with_suffix(".jsonl").write_text(text)
    draw(curves, record, stem.with_suffix(".png"))
    session.say(json.dumps(record, indent=1))


def transformers_class() -> Any:
    """Qwen3.5's text model in plain torch, though fla may be installed for GPUs."""
    # It looks for these when the class is first asked for.
    hidden = {name: sys.modules.get(name) for name in ("fla", "causal_conv1d")}
    sys.modules.update(dict.fromkeys(hidden))
    found = transformers.Qwen3_5ForCausalLM
    for name, module in hidden.items():
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module
    return found


def transformers_model(folder: str) -> tuple[Any, Any]:
    model = transformers_class().from_pretrained(folder, dtype=torch.float32)
    return model, lambda tokens: model(tokens, use_cache=False).logits


def megatron_model(folder: str, spec: Any = None) -> tuple[Any, Any]:
    """A HybridModel with the folder's weights, and its logits of a batch."""
    model, _ = build_model(
        folder, modules="local", dtype=torch.float32, parallel_output=False, spec=spec
    )
    load_hf_weights(model, folder)

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        positions = torch.arange(length).expand_as(tokens)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        return model(tokens, positions, future[None, None])

    return model, logits


def rounded_model(folder: str) -> tuple[Any, Any]:
    model, logits = megatron_model(folder)
    with torch.no_grad():
        for weight in model.parameters():
            sign = torch.randint_like(weight, 2) * 2 - 1
            weight.mul_(1 + sign * 2.0**-23)
    return model, logits


def upstream_model(folder: str) -> tuple[Any, Any]:
    """The same HybridModel around megatron-core's layer, with plain torch for its
    kernels."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    from tests.precision.training import stack_of

    spec = stack_of(upstream_layer=True, spec_options={"qk_layernorm": True})
    model, logits = megatron_model(folder, spec)
    assert any(type(module) is GatedDeltaNet for module in model.modules())
    return model, logits


MODELS = {
    OURS: megatron_model,
    "megatron-core": upstream_model,
    "transformers": transformers_model,
    ROUNDED: rounded_model,
}


def batches(row: dict[str, Any]) -> Iterable[Any]:
    """Rows of the Python standard library's source, shuffled by a seed: tokens, labels,
    mask."""
    sys.path.insert(0, str(ROOT / "examples"))
    from pretraining.corpus import standard_library
    from pretraining.feed import Feed

    return Feed(
        standard_library(),
        seed=1,
        seq_length=row["tokens"],
        micro_batch_size=row["rows"],
        packing=False,
        multiple=1,
        cp_size=1,
        cp_rank=0,
        dp_size=1,
        dp_rank=0,
        device=torch.device("cpu"),
    )


def losses(model: Any, logits_of: Any, row: dict[str, Any]) -> list[float]:
    """Train, and the loss of every step in nats per byte, before its update."""
    model.train()
    # Gains, and A_log and dt_bias, are not drawn towards zero: a gain stored around
    # another centre would be drawn elsewhere.
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=row["lr"], betas=(0.9, 0.95))
    steps = row["steps"]
    warm_up = max(1, steps // 10)
    found: list[float] = []
    for step, batch in zip(range(steps), batches(row), strict=False):
        # fp32 would round a loss to 5e-7.
        logits = logits_of(batch.tokens).double()
        each = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.labels.flatten(), reduction="none"
        )
        loss = (each * batch.loss_mask.flatten()).sum() / batch.loss_mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / steps)
        for group in optimizer.param_groups:
            group["lr"] = row["lr"] * min((step + 1) / warm_up, 1.0) * cosine
        optimizer.step()
        found.append(loss.item())
    return found


def distances(curves: dict[str, list[float]]) -> dict[str, list[float]]:
    """How far each curve is from ours."""
    ours = curves[OURS]
    others = {name: values for name, values in curves.items() if name != OURS}
    return {
        name: [abs(a - b) for a, b in zip(values, ours, strict=True)]
        for name, values in others.items()
    }


def parting(curves: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """The distances at the first step, at most, and over the last tenth."""
    found = {}
    for name, apart in distances(curves).items():
        last = max(1, len(apart) // 10)
        means = (sum(curves[name][-last:]) - sum(curves[OURS][-last:])) / last
        found[name] = {
            "first": apart[0],
            "largest": max(apart),
            "last tenth's mean": means,
        }
    return found


def versions() -> dict[str, str]:
    names = ("torch", "megatron-core", "transformers")
    return {name: importlib.metadata.version(name) for name in names}


def draw(curves: dict[str, list[float]], record: dict, path: Path) -> None:
    """Above the losses, which lie on one another; below how far each is from ours."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 6.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    steps = range(1, record["steps"] + 1)
    for name, style in zip(curves, ("-", "--", ":"), strict=False):
        above.plot(steps, curves[name], style, linewidth=1.6, label=name)
    for name, apart in distances(curves).items():
        below.plot(steps, apart, linewidth=1.0, label=name)
    above.set_ylabel("loss (nats per byte)")
    below.set_ylabel("distance from megatron_gdn")
    below.set_yscale("log")
    below.set_xlabel(f"step of {record['rows']} x {record['tokens']} bytes")
    for axes in (above, below):
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.3)
    found = record["versions"].items()
    stated = ", ".join(f"{name} {version}" for name, version in found)
    above.set_title(f"GDN x3 + attention, fp32, cpu; {stated}", fontsize=9)
    figure.savefig(path, dpi=120)
