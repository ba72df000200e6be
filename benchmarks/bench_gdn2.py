"""Our Gated DeltaNet-2 beside Megatron main's own layer: forward and backward, with one
checkpoint.

    MEGATRON_LM=FOLDER python3 benchmarks/bench_gdn2.py --out results.jsonl   1 x 8192 and packed
    python3 benchmarks/bench_gdn2.py --tiny                     a few tokens of ours,
                                                                anywhere

FOLDER, by default ``shared/megatron-lm``, is a clone of Megatron-LM at main, or its
folder ``megatron`` alone: no network is needed. Both layers then run in that Megatron.
Without it ours is measured alone. Both project, convolve, gate, run fla's kernels of
the recurrence, norm and project back, in bf16 with local linears. Every case's times
are printed as soon as they are known.

Legend: D hidden, G key heads, H value heads.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

CLONE = Path(os.environ.get("MEGATRON_LM", "shared/megatron-lm"))
HAS_THEIRS = (CLONE / "megatron/core/ssm/gated_delta_net/gdn2.py").is_file()
if HAS_THEIRS:  # before anything imports Megatron
    sys.path.insert(0, str(CLONE.resolve()))

import torch  # noqa: E402
from bench_kda import CASES, TINY, tune_over  # noqa: E402
from lib.layers import DEVICE, start_megatron, thd  # noqa: E402
from lib.measure import (  # noqa: E402
    environment,
    table,
    times_of_layer,
    write_lines,
)

from megatron_gdn import GatedDeltaNet2, GatedDeltaNetSubmodules  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--value-heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--recompute", nargs="+", default=["none", "light"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--configurations",
        type=int,
        help="of each of fla's kernels to tune over; default all",
    )
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start no new case after this"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny sizes and 2 repeats")
    parser.add_argument("--out", help="append JSON lines to this file")
    args = parser.parse_args()
    if args.tiny:
        args.hidden = 32
        args.key_heads = 2
        args.value_heads = 4
        args.head_dim = 16
        args.repeats = 2
    return args


def build(args: argparse.Namespace) -> dict[str, Any]:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import (
        ColumnParallelLinear,
        RowParallelLinear,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_gdn.compat.torch_norm import TorchRMSNorm

    config = TransformerConfig(
        num_layers=1,
        hidden_size=args.hidden,
        num_attention_heads=4,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        linear_num_key_heads=args.key_heads,
        linear_num_value_heads=args.value_heads,
        linear_key_head_dim=args.head_dim,
        linear_value_head_dim=args.head_dim,
        linear_conv_kernel_dim=4,
        bf16=True,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=DEVICE == "cpu",
    )
    parts = {
        "in_proj": ColumnParallelLinear,
        "out_norm": TorchRMSNorm,
        "out_proj": RowParallelLinear,
    }
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    backend = "fla" if DEVICE == "cuda" else "reference"
    layers: dict[str, Any] = {
        f"ours, {backend}, recompute {level}": GatedDeltaNet2(
            config,
            GatedDeltaNetSubmodules(**parts),
            pg_collection=groups,
            backend=backend,
            recompute=level,
        ).to(DEVICE)
        for level in args.recompute
    }
    if HAS_THEIRS and DEVICE == "cuda":
        from megatron.core.ssm import gated_delta_net as upstream

        theirs: Any = upstream
        layers["Megatron's"] = theirs.GatedDeltaNet2(
            config, theirs.GatedDeltaNetSubmodules(**parts), 1, pg_collection=groups
        ).to(DEVICE)
    first, *others = layers.values()
    for layer in others:
        layer.load_state_dict(first.state_dict())
    return layers


def main() -> None:
    args = arguments()
    began = time.monotonic()
    start_megatron()
    torch.manual_seed(0)
    layers = build(args)
    if args.configurations is not None:
        tune_over(args.configurations)
    rows = [["case", "whose", "fwd ms", "fwd+bwd ms", "kept MiB", "of Megatron's"]]
    for case in TINY if args.tiny else CASES:
        if time.monotonic() - began > args.seconds:
            print(f"{case.name}: skipped, out of time", flush=True)
            continue
        x = torch.randn(
            case.tokens, case.batch, args.hidden, device=DEVICE, dtype=torch.bfloat16
        )
        x.requires_grad_()
        packed = thd(case.offsets())
        found = {}
        outputs = []
        for whose, layer in layers.items():

            def run(
                layer: Any = layer, x: torch.Tensor = x, packed: Any = packed
            ) -> torch.Tensor:
                return layer(x, None, packed_seq_params=packed)[0]

            outputs.append(run().detach().float())
            found[whose] = made = times_of_layer(run, layer, x, args.repeats)
            forward = made["forward"]["median"]
            both = made["both"]["median"]
            kept = f"{made['kept_mib']:.0f}" if "kept_mib" in made else ""
            rows.append([case.name, whose, f"{forward:.3f}", f"{both:.3f}", kept, ""])
            print(*rows[-1], f"after {time.monotonic() - began:.0f} s", flush=True)
        apart = [(y - outputs[0]).norm() / outputs[0].norm() for y in outputs]
        found["outputs apart"] = max(map(float, apart))
        print(
            f"{case.name}: outputs are {found['outputs apart']:.1e} apart", flush=True
        )
        for row in rows[-len(layers) :] if "Megatron's" in found else ():
            ratio = (
                found[row[1]]["both"]["median"] / found["Megatron's"]["both"]["median"]
            )
            row[-1] = f"{ratio:.2f}"
        sizes = [args.hidden, args.key_heads, args.value_heads, args.head_dim]
        setting = environment() if DEVICE == "cuda" else {"gpu": "none"}
        record = {"case": case.name, "sizes": sizes, **found}
        write_lines(args.out, [{**record, "environment": setting}])
    print(table(rows))


if __name__ == "__main__":
    main()
