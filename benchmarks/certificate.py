"""Measures how context parallelism changes results of a layer and of a model used as RL
policy.

    python benchmarks/certificate.py --heads 16:32 --cp 2 4 8 --modes headwise chunkwise

The table has one row for every precision, scheme and number of ranks. An error is
max|found - exact| / max|exact|. The error of the gradients is that of the worst
gradient.

    layer   output and gradients against the same layer in fp64, with the same rounded
            weights
    policy  probabilities q of a model with attention, against p of one rank in the same
            precision: KL = mean_t sum_v p_v log(p_v / q_v),  ratio_t = q(token) / p(token)

Each rank has one GPU; without GPUs, ranks are processes over gloo and the rule is plain
torch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_gdn.command_line import (
    MOST_HEAD_DIM,
    MOST_RANKS,
    Parser,
    parse_heads,
    parse_whole_number,
)
from megatron_gdn.compat.observe import hide_import_notes
from megatron_gdn.context_parallel import local_indices
from megatron_gdn.mixers.padding import packed_seq_params_of

sys.path.append(str(Path(__file__).parents[1]))
from benchmarks.lib.model import DEVICE, transformer_config  # noqa: E402
from benchmarks.lib.pages import markdown  # noqa: E402
from benchmarks.lib.processes import in_processes  # noqa: E402

CLIP = 0.2  # PPO and GRPO usually clip the ratio to 1 - 0.2 .. 1 + 0.2
_MOST_HIDDEN = 2**20
VOCABULARY = 512
PATTERN = "G-*-G-"
SCHEMES = ["headwise", "chunkwise"]
ON_GPU = DEVICE == "cuda"
# By the name of a precision: the dtype of weights and activations, and rule_operands.
PRECISIONS = {"fp32": (torch.float32, "fp16"), "bf16": (torch.bfloat16, "fp16")}
if ON_GPU:
    PRECISIONS["bf16, bf16 operands"] = (torch.bfloat16, "bf16")


class Row(NamedTuple):
    """One line of the certificate; the module's docstring defines the errors."""

    precision: str
    mode: str
    ranks: int
    output: float
    gradients: float
    kl: float
    ratio_mean: float
    ratio_farthest: float  # max|ratio - 1|
    clipped: float

    @property
    def cells(self) -> dict[str, str]:
        """The texts of this row, by the headings of their columns."""
        return {
            "precision": self.precision,
            "scheme": self.mode,
            "ranks": str(self.ranks),
            "output": f"{self.output:.1e}",
            "worst gradient": f"{self.gradients:.1e}",
            "KL": f"{self.kl:.1e}",
            "mean ratio - 1": f"{self.ratio_mean - 1:+.1e}",
            "farthest ratio from 1": f"{self.ratio_farthest:.1e}",
            f"ratios outside 1 ± {CLIP}": f"{self.clipped:.2%}",
        }


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options ``given``, by default those of the command line; exit if one is
    wrong."""
    parser = Parser(
        "python benchmarks/certificate.py",
        description="What context parallelism changes in a layer and in a policy step.",
    )
    add = parser.add_argument
    add(
        "--heads",
        type=parse_heads,
        default=(16, 32),
        metavar="KEY:VALUE",
        help="as 16:32",
    )
    add("--head-dim", type=partial(parse_whole_number, most=MOST_HEAD_DIM), default=128)
    add("--hidden", type=partial(parse_whole_number, most=_MOST_HIDDEN), default=256)
    lengths = {"type": parse_whole_number, "nargs": "+", "default": [512, 256, 256]}
    add("--lengths", **lengths, help="of the packed documents")
    ranks = partial(parse_whole_number, most=MOST_RANKS)
    add("--cp", type=ranks, nargs="+", default=[2, 4], help="numbers of ranks")
    add("--modes", nargs="+", default=SCHEMES, choices=SCHEMES)
    add("--json", action="store_true", help="one JSON line a row in place of a table")
    args = parser.parse_args(given)
    for cp in args.cp:
        if any(length % (2 * cp) for length in args.lengths):
            parser.error(
                f"--lengths {args.lengths}: every document must be a multiple of "
                f"{2 * cp}"
            )
        if ON_GPU and cp > torch.cuda.device_count():
            parser.error(
                f"--cp {cp}: this machine has {torch.cuda.device_count()} GPUs"
            )
    return args


def certificate(args: argparse.Namespace) -> list[Row]:
    """Compare schemes on all ranks with fp64; return the table's rows; ``args``: parsed
    options."""
    found = {}
    for cp in (1, *args.cp):
        with tempfile.TemporaryDirectory() as folder:
            in_processes(_run_rank, cp, folder, args, processes=cp, timeout=3600)
            ranks = [torch.load(f"{folder}/{rank}.pt") for rank in range(cp)]
        for name, mode in ranks[0]:
            of_ranks = [rank[name, mode] for rank in ranks]
            found[name, mode, cp] = _join_ranks(of_ranks, args.lengths)
    cases = [("one rank", 1), *product(args.modes, args.cp)]
    rows = []
    for name, (mode, cp) in product(PRECISIONS, cases):
        exact = found[name, "fp64", 1]
        one_rank = found[name, "one rank", 1]
        rows.append(_make_row(name, mode, cp, found[name, mode, cp], exact, one_rank))
    return rows


def _make_row(
    name: str, mode: str, cp: int, found: Any, exact: Any, one_rank: Any
) -> Row:
    """Errors of ``found`` against ``exact`` (fp64); its KL and ratios against
    ``one_rank``."""
    gradients = [
        _relative_error(found[x], exact[x])
        for x in exact
        if x not in ("output", "logits", "token")
    ]
    p, q = (x["logits"].double().log_softmax(-1) for x in (one_rank, found))
    token = one_rank["token"][:, None]
    ratio = (q - p).gather(1, token).exp()
    inside = (ratio - 1).abs() <= CLIP  # NaN is not inside
    return Row(
        name,
        mode,
        cp,
        _relative_error(found["output"], exact["output"]),
        # NaN if one of them is, as max() may not be
        torch.tensor(gradients).max().item(),
        (p.exp() * (p - q)).sum(-1).mean().item(),
        ratio.mean().item(),
        (ratio - 1).abs().max().item(),
        (~inside).double().mean().item(),
    )


def _relative_error(found: Tensor, exact: Tensor) -> float:
    """max|found - exact| / max|exact|, computed in fp64."""
    exact = exact.double()
    return ((found.double() - exact).abs().max() / exact.abs().max()).item()


def _join_ranks(ranks: list[dict[str, Tensor]], lengths: list[int]) -> dict[str, Any]:
    """Join the ranks' tensors in the order of the tokens, and sum the parameters'
    gradients."""
    whole = {}
    for name, first in ranks[0].items():
        if name.endswith("'s gradient"):
            whole[name] = sum(rank[name].double() for rank in ranks)
            continue
        whole[name] = first.new_empty(sum(lengths), *first.shape[1:])
        for number, rank in enumerate(ranks):
            whole[name][local_indices(lengths, len(ranks), number)] = rank[name]
    return whole


def _run_rank(rank: int, cp: int, folder: str, args: argparse.Namespace) -> None:
    """Save the results of every precision and scheme on one of ``cp`` ranks."""
    hide_import_notes()
    from benchmarks.lib.layers import start_megatron

    if not ON_GPU:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // cp))
    store = dist.FileStore(f"{folder}/store", cp)  # pyright: ignore[reportPrivateImportUsage]
    start_megatron(rank, cp, store, context_parallel_size=cp)
    modes = ["one rank", "fp64"] if cp == 1 else args.modes
    made = {}
    for (name, (dtype, operands)), mode in product(PRECISIONS.items(), modes):
        config = transformer_config(
            args.hidden,
            dtype,
            num_layers=len(PATTERN),
            activation_func=torch.nn.functional.gelu,
            context_parallel_size=cp,
            cp_comm_type="p2p",
            init_method_std=0.1,
            calculate_per_token_loss=True,
            use_cpu_initialization=True,
            linear_num_key_heads=args.heads[0],
            linear_num_value_heads=args.heads[1],
            linear_key_head_dim=args.head_dim,
            linear_value_head_dim=args.head_dim,
        )
        options = {"rule_operands": operands}
        if cp > 1:
            options["linear_cp_mode"] = mode
        given = (config, options, args.lengths, mode == "fp64")
        made[name, mode] = _run_layer(*given) | _run_policy(*given)
    # not returned: unpickling tensors of here imports Megatron, which warns
    torch.save(made, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _prepared(module: nn.Module, fp64: bool) -> Any:
    """``module`` on the device; its rounded parameters in fp64, if asked for."""
    module = module.to(DEVICE)
    if fp64:
        for parameter in module.parameters():
            parameter.data = parameter.data.double()
    return module


def _tokens(lengths: list[int]) -> tuple[Tensor, Any]:
    """Where this rank's tokens are, and their documents."""
    held = local_indices(lengths, dist.get_world_size(), dist.get_rank())
    return held, packed_seq_params_of("thd", lengths, None, max(lengths), DEVICE)


def _run_layer(
    config: Any, options: dict[str, Any], lengths: list[int], fp64: bool
) -> dict[str, Tensor]:
    """Output and gradients of one layer, on this rank's tokens."""
    from megatron.core.transformer.spec_utils import build_module

    from megatron_gdn.specs import gated_delta_net_spec

    held, packed = _tokens(lengths)
    torch.manual_seed(1)
    spec = gated_delta_net_spec("local", **options)
    layer: Any = build_module(spec, config, layer_number=1)
    layer = _prepared(layer, fp64)
    both = torch.randn(2, sum(lengths), 1, config.hidden_size).to(config.params_dtype)
    if fp64:
        both = both.double()
    x, d_out = both[:, held].to(DEVICE)
    x.requires_grad_()
    out, _ = layer(x, None, packed_seq_params=packed)
    out.backward(d_out)
    assert x.grad is not None
    made = {"output": out.detach().cpu(), "input gradient": x.grad.cpu()}
    for name, parameter in layer.named_parameters():
        if parameter.grad is not None:
            made[f"{name}'s gradient"] = parameter.grad.cpu()
    return made


@torch.no_grad()
def _run_policy(
    config: Any, options: dict[str, Any], lengths: list[int], fp64: bool
) -> dict[str, Tensor]:
    """Logits of a model with attention, and the tokens to predict."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from megatron_gdn.specs import hybrid_stack_spec

    held, packed = _tokens(lengths)
    torch.manual_seed(2)
    spec = hybrid_stack_spec("local", **options)
    model = HybridModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=max(lengths),
        hybrid_layer_pattern=PATTERN,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    model = _prepared(model, fp64)
    tokens = torch.randint(VOCABULARY, (1, sum(lengths) + 1))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    shown, places = (x[:, held].to(DEVICE) for x in (tokens[:, :-1], positions))
    logits = model(shown, places, None, packed_seq_params=packed)
    return {"logits": logits[0].float().cpu(), "token": tokens[0, 1:][held]}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the rows; return the exit status 0, or 1 if a number is NaN or infinite."""
    args = parse_arguments(argv)
    rows = certificate(args)
    if args.json:
        for row in rows:
            print(json.dumps(row._asdict()))
    else:
        cells = [list(row.cells.values()) for row in rows]
        print(markdown([list(rows[0].cells), *cells]))
    if all(math.isfinite(number) for row in rows for number in row[3:]):
        return 0
    print("error: a number of the table is NaN or infinite", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
