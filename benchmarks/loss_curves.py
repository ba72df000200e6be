"""Loss curves of one small hybrid model with three layers: ours, megatron-core's,
transformers'.

    python benchmarks/loss_curves.py         # docs/evidence.jsonl and docs/evidence.png

All start from the same random weights, read the same text in the same order and take
the same steps (AdamW, warm-up and cosine, clipped), in fp32 on the CPU. The weights
reach Megatron by `megatron_gdn.hf.load_hf_weights`. Rounding alone makes two runs part
after a while: a fourth curve, ours from weights that are off by one rounding, says how
far.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
OURS = "megatron_gdn"
UPSTREAM = "megatron-core"
TRANSFORMERS = "transformers"
ROUNDED = "megatron_gdn, weights off by one rounding"
SIZES = {
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


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=4, help="sequences of a batch")
    parser.add_argument("--tokens", type=int, default=128, help="of a sequence")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "docs" / "evidence", metavar="STEM"
    )
    parser.add_argument(
        "--gpu", action="store_true", help="run on the GPU, with its kernels"
    )
    args = parser.parse_args(argv)
    if not args.gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Upstream's gate is compiled; written out, it is what the other two compute.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

    curves = {}
    with tempfile.TemporaryDirectory() as folder:
        start(Path(folder))
        for name, make in MODELS.items():
            curves[name] = losses(make(Path(folder)), args, name)
    record = {
        "steps": args.steps,
        "rows": args.rows,
        "tokens": args.tokens,
        "lr": args.lr,
    }
    record |= {"device": "gpu" if args.gpu else "cpu", "versions": versions()}
    record |= {"date": datetime.date.today().isoformat(), "parting": parting(curves)}
    lines = [
        record,
        *(
            {"step": i + 1} | dict(zip(curves, at, strict=True))
            for i, at in enumerate(zip(*curves.values(), strict=True))
        ),
    ]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.with_suffix(".jsonl").write_text(
        "".join(json.dumps(x) + "\n" for x in lines)
    )
    draw(curves, record, args.output.with_suffix(".png"))
    print(json.dumps(record, indent=1))


def start(folder: Path) -> None:
    """Megatron for one rank, and a transformers model's random weights in
    ``folder``."""
    import torch
    import transformers

    sys.path.insert(0, str(ROOT))
    from benchmarks.lib.layers import start_megatron

    torch.set_num_threads(1)
    start_megatron()
    torch.manual_seed(1)
    config = transformers.Qwen3_5TextConfig(**SIZES, tie_word_embeddings=False)
    transformers_class()(config).save_pretrained(folder)


def transformers_class():
    """Qwen3.5's text model; on a CPU in plain torch, though fla may be installed for
    GPUs."""
    import torch
    import transformers

    if torch.cuda.is_available():
        return transformers.Qwen3_5ForCausalLM
    # It looks for these when the class is first asked for.
    hidden = {name: sys.modules.get(name) for name in ("fla", "causal_conv1d")}
    sys.modules.update(dict.fromkeys(hidden))
    found = transformers.Qwen3_5ForCausalLM
    for name, module in hidden.items():
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module
    return found


def transformers_model(folder: Path):
    import torch

    model = transformers_class().from_pretrained(folder, dtype=torch.float32)
    return model.train(), lambda tokens: model(tokens, use_cache=False).logits


def megatron_model(folder: Path, spec=None, rounded: bool = False):
    """A HybridModel with the folder's weights, and its logits of a batch."""
    import torch

    from megatron_gdn.hf import build_model, load_hf_weights

    model, _ = build_model(
        folder, modules="local", dtype=torch.float32, parallel_output=False, spec=spec
    )
    load_hf_weights(model, folder)
    if rounded:
        with torch.no_grad():
            for weight in model.parameters():
                sign = torch.randint_like(weight, 2) * 2 - 1
                weight.mul_(1 + sign * 2.0**-23)

    def logits(tokens):
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device).expand_as(tokens)
        future = torch.ones(
            length, length, dtype=torch.bool, device=tokens.device
        ).triu(1)
        return model(tokens, positions, future[None, None])

    return model.train(), logits


def upstream_model(folder: Path):
    """The same HybridModel around megatron-core's layer; on a CPU plain torch for its
    kernels."""
    import megatron.core.ssm.gated_delta_net as package
    import torch
    from megatron.core.ssm.gated_delta_net import common, gdn

    from megatron_gdn.ops import causal_conv1d, l2norm
    from megatron_gdn.specs import hybrid_stack_spec

    if not torch.cuda.is_available():
        # fla's conv and norm have no CPU form; the delta rule is upstream's own, in
        # torch.
        gdn.l2norm = common.l2norm = lambda x, **_: l2norm(x)
        gdn.causal_conv1d = lambda x, weight, bias, activation, cu_seqlens, **_: (
            causal_conv1d(x, weight, bias, activation, cu_seqlens=cu_seqlens)
        )
        gdn.chunk_gated_delta_rule = package.torch_chunk_gated_delta_rule
    spec = hybrid_stack_spec("local", qk_layernorm=True)
    mixer = spec.submodules.gdn_layer.submodules.self_attention
    parts = mixer.submodules
    mixer.module = package.GatedDeltaNet
    mixer.params = {}
    mixer.submodules = package.GatedDeltaNetSubmodules(
        in_proj=parts.in_proj, out_norm=parts.out_norm, out_proj=parts.out_proj
    )
    model, logits = megatron_model(folder, spec)
    assert any(type(module) is package.GatedDeltaNet for module in model.modules())
    return model, logits


MODELS: dict[str, Callable] = {
    OURS: megatron_model,
    UPSTREAM: upstream_model,
    TRANSFORMERS: transformers_model,
    ROUNDED: lambda folder: megatron_model(folder, rounded=True),
}


def batches(args: argparse.Namespace, device) -> Iterable:
    """Rows of the Python standard library's source, shuffled by a seed: tokens, labels,
    mask."""
    from pretraining.corpus import standard_library
    from pretraining.feed import Feed

    return Feed(
        standard_library(),
        seed=1,
        seq_length=args.tokens,
        micro_batch_size=args.rows,
        packing=False,
        multiple=1,
        cp_size=1,
        cp_rank=0,
        dp_size=1,
        dp_rank=0,
        device=device,
    )


def losses(model_and_logits, args: argparse.Namespace, name: str) -> list[float]:
    """Train, and the loss of every step in nats per byte, before its update."""
    import torch
    from tqdm import tqdm

    model, logits_of = model_and_logits
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    # Gains, and A_log and dt_bias, are not drawn towards zero: a gain stored around
    # another centre would be drawn elsewhere.
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    warm_up = max(1, args.steps // 10)
    found: list[float] = []
    feed = iter(batches(args, device))
    for step in tqdm(range(args.steps), desc=name, mininterval=5):
        batch = next(feed)
        # fp32 would round a loss to 5e-7.
        logits = logits_of(batch.tokens).double()
        each = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.labels.flatten(), reduction="none"
        )
        loss = (each * batch.loss_mask.flatten()).sum() / batch.loss_mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / args.steps)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min((step + 1) / warm_up, 1.0) * cosine
        optimizer.step()
        found.append(loss.item())
    return found


def parting(curves: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """How far each curve is from ours: at the first step, at most, and over the last
    tenth."""
    ours = curves[OURS]
    found = {}
    for name, losses_of in curves.items():
        if name != OURS:
            apart = [abs(a - b) for a, b in zip(losses_of, ours, strict=True)]
            last = max(1, len(apart) // 10)
            means = (sum(losses_of[-last:]) - sum(ours[-last:])) / last
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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7.5, 6.5), sharex=True, layout="constrained"
    )
    steps = range(1, record["steps"] + 1)
    for index, (name, values) in enumerate(curves.items()):
        style = ("-", "--", ":", "-")[index]
        if name != ROUNDED:
            above.plot(steps, values, style, linewidth=1.6, label=name)
        if name != OURS:
            apart = [abs(a - b) for a, b in zip(values, curves[OURS], strict=True)]
            color = "0.6" if name == ROUNDED else f"C{index}"
            below.plot(steps, apart, style, linewidth=1.0, color=color, label=name)
    above.set_ylabel("loss (nats per byte)")
    below.set_ylabel("distance from megatron_gdn")
    below.set_yscale("log")
    below.set_xlabel(f"step of {record['rows']} x {record['tokens']} bytes")
    for axes in (above, below):
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.3)
    stated = ", ".join(
        f"{name} {version}" for name, version in record["versions"].items()
    )
    above.set_title(
        f"GDN x3 + attention, fp32, {record['device']}; {stated}", fontsize=9
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
