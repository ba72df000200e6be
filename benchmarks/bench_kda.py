"""Our Kimi Delta Attention beside fla's own layer and Megatron's, in one run, at the
same sizes.

    python3 benchmarks/bench_kda.py --out results.jsonl   1 x 8192 and packed, on a GPU
    MEGATRON_LM=FOLDER python3 benchmarks/bench_kda.py   beside Megatron's own layer,
                                                         too
    python3 benchmarks/bench_kda.py --tiny               a few tokens of ours, on any
                                                         machine

FOLDER is a clone of Megatron-LM with KimiDeltaAttention (pull request 6556); ours runs
in it too. All layers project, convolve, gate, run the recurrence, norm and project
back, in bf16 with local linears; their weights differ. Ours runs fla's kernels of the
recurrence or cuDNN's. Every case's times are printed as soon as they are known.

Legend: S seq, B batch, D hidden, H heads, K head dim.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

CLONE = Path(os.environ.get("MEGATRON_LM", "shared/megatron-lm"))
HAS_MEGATRONS = (CLONE / "megatron/core/ssm/gated_delta_net/kda.py").is_file()
if HAS_MEGATRONS:  # before anything imports Megatron
    sys.path.insert(0, str(CLONE.resolve()))

import torch  # noqa: E402
from lib.layers import DEVICE, Case, start_megatron, thd  # noqa: E402
from lib.measure import environment, table, time_of, write_lines  # noqa: E402
from torch import nn  # noqa: E402

from megatron_gdn import KimiDeltaAttention  # noqa: E402
from megatron_gdn.specs import kimi_delta_attention_spec  # noqa: E402

CASES = (Case("1x8192", 1, 8192), Case("thd8192", 1, 8192, documents=16))
TINY = (Case("2x96", 2, 96), Case("thd160", 1, 160, documents=3))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--lower-bound", type=float, help="of the gate; -5 is usual")
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=("fla", "cudnn"),
        default=["fla"],
        help="of our layer; without a GPU plain torch",
    )
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
        args.heads = 4
        args.head_dim = 16
        args.repeats = 2
    return args


def config_of(args: argparse.Namespace, **more: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=args.hidden,
        num_attention_heads=4,
        normalization="RMSNorm",
        activation_func=nn.functional.silu,  # Megatron's class takes no other
        linear_num_key_heads=args.heads,
        linear_num_value_heads=args.heads,
        linear_key_head_dim=args.head_dim,
        linear_value_head_dim=args.head_dim,
        linear_conv_kernel_dim=4,
        bf16=True,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=DEVICE == "cpu",
        **more,
    )


def local_modules() -> dict[str, Any]:
    from megatron.core.tensor_parallel.layers import (
        ColumnParallelLinear,
        RowParallelLinear,
    )

    from megatron_gdn.compat.torch_norm import TorchRMSNorm

    return {
        "in_proj": ColumnParallelLinear,
        "out_norm": TorchRMSNorm,
        "out_proj": RowParallelLinear,
    }


def groups() -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])


def build_ours(args: argparse.Namespace, backend: str, **ranks: int) -> nn.Module:
    """Our layer, whose gates have the low rank of Kimi Linear unless ``ranks`` say
    otherwise."""
    mixer = KimiDeltaAttention(
        config_of(args),
        kimi_delta_attention_spec("local").submodules,
        pg_collection=groups(),
        gate_lower_bound=args.lower_bound,
        backend=backend,
        **{"forget_rank": args.head_dim, "output_rank": args.head_dim, **ranks},
    )
    return mixer.to(DEVICE)


def build_megatrons(args: argparse.Namespace) -> nn.Module:
    """Megatron's own class, whose gates have full width."""
    upstream: Any = import_module("megatron.core.ssm.gated_delta_net")
    bound = args.lower_bound
    config = config_of(args, kda_safe_gate=bound is not None, kda_lower_bound=bound)
    modules = local_modules()
    submodules = upstream.KimiDeltaAttentionSubmodules(
        **modules, beta_proj=modules["in_proj"]
    )
    return upstream.KimiDeltaAttention(
        config, submodules, 1, pg_collection=groups()
    ).to(DEVICE)


def build_theirs(args: argparse.Namespace) -> nn.Module:
    bound = args.lower_bound
    layer = _fla_module().KimiDeltaAttention(
        hidden_size=args.hidden,
        head_dim=args.head_dim,
        num_heads=args.heads,
        safe_gate=bound is not None,
        lower_bound=bound,
    )
    return layer.to(DEVICE, torch.bfloat16)


def _fla_module() -> Any:
    """fla.layers.kda; without fla.layers itself where that needs packages that are not
    here."""
    try:
        return import_module("fla.layers.kda")
    except ModuleNotFoundError:
        found = find_spec("fla")
        package = ModuleType("fla.layers")
        assert found is not None and found.submodule_search_locations
        package.__path__ = [
            f"{folder}/layers" for folder in found.submodule_search_locations
        ]
        sys.modules["fla.layers"] = package
        return import_module("fla.layers.kda")


def tune_over(most: int) -> None:
    """Leave each of fla's kernels, of those imported so far, its first
    configurations."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("fla."):
            continue
        for kernel in list(vars(module).values()):
            while hasattr(kernel, "fn") and not hasattr(kernel, "configs"):
                kernel = kernel.fn
            if isinstance(getattr(kernel, "configs", None), list):
                kernel.configs = kernel.configs[:most]


def measured(run, module: nn.Module, x: torch.Tensor, repeats: int) -> dict[str, Any]:
    """Forward, forward and backward, and the MiB that are kept in between."""
    forward = time_of(run, repeats)
    grad = torch.randn_like(run())

    def both() -> None:
        x.grad = None
        module.zero_grad(set_to_none=True)
        run().backward(grad)

    made = {"forward": forward, "both": time_of(both, repeats)}
    if DEVICE == "cuda":
        before = torch.cuda.memory_allocated()
        out = run()
        made["kept_mib"] = (torch.cuda.memory_allocated() - before) / 2**20
        del out
    return made


def main() -> None:
    args = arguments()
    began = time.monotonic()
    start_megatron()
    torch.manual_seed(0)
    backends = args.backends if DEVICE == "cuda" else ["reference"]
    ours = {f"ours, {backend}": build_ours(args, backend) for backend in backends}
    theirs = build_theirs(args) if DEVICE == "cuda" else None
    if HAS_MEGATRONS and DEVICE == "cuda":
        full = {"forget_rank": 0, "output_rank": 0}
        ours["ours, full gates"] = build_ours(args, backends[0], **full)
        ours["Megatron's"] = build_megatrons(args)
    if args.configurations is not None:
        tune_over(args.configurations)
    rows = [["case", "whose", "fwd ms", "fwd+bwd ms", "kept MiB", "of fla's"]]
    for case in TINY if args.tiny else CASES:
        if time.monotonic() - began > args.seconds:
            print(f"{case.name}: skipped, out of time", flush=True)
            continue
        offsets = case.offsets()
        x = torch.randn(
            case.tokens, case.batch, args.hidden, device=DEVICE, dtype=torch.bfloat16
        )
        x.requires_grad_()
        packed = thd(offsets)
        runs: dict[str, Any] = {
            whose: (
                layer,
                lambda x=x, p=packed, layer=layer: layer(x, None, packed_seq_params=p)[
                    0
                ],
            )
            for whose, layer in ours.items()
        }
        if theirs is not None:
            rows_of = x.detach().transpose(0, 1).contiguous().requires_grad_()
            cut = None if offsets is None else torch.tensor(offsets, device=DEVICE)
            run = lambda x=rows_of, c=cut: theirs(x, cu_seqlens=c)[0]  # noqa: E731
            runs["fla's"] = (theirs, run)
        found = {}
        for whose, (module, run) in runs.items():
            leaf = x if whose in ours else rows_of
            found[whose] = made = measured(run, module, leaf, args.repeats)
            forward = made["forward"]["median"]
            both = made["both"]["median"]
            kept = f"{made['kept_mib']:.0f}" if "kept_mib" in made else ""
            rows.append([case.name, whose, f"{forward:.3f}", f"{both:.3f}", kept, ""])
            print(*rows[-1], f"after {time.monotonic() - began:.0f} s", flush=True)
        for row in rows[-len(runs) :] if theirs is not None else ():
            ratio = found[row[1]]["both"]["median"] / found["fla's"]["both"]["median"]
            row[-1] = f"{ratio:.2f}"
        sizes = [args.hidden, args.heads, args.head_dim, args.lower_bound]
        setting = environment() if DEVICE == "cuda" else {"gpu": "none"}
        record = {"case": case.name, "sizes": sizes, **found}
        write_lines(args.out, [{**record, "environment": setting}])
    print(table(rows))


if __name__ == "__main__":
    main()
