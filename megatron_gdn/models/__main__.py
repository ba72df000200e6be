"""``python -m megatron_gdn.models`` prints a list of models, or one model's figures or
flags."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..command_line import Parser, print_error

if TYPE_CHECKING:
    from .model import Model

_DESCRIPTION = """\
Without NAME, list the models. With NAME, print parameters, FLOPs, memory and legal sizes. Vision
encoders and multi-token prediction heads are not counted.
"""
# symbol of a layer -> its name in the printed lines
_LAYER_NAMES = {
    "G": "Gated DeltaNet",
    "K": "Kimi Delta Attention",
    "M": "Mamba2",
    "*": "attention",
    "+": "latent attention",
    "-": "MLP",
    "E": "experts",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of ``argv`` (None: of the process). Return the exit code: 0 for
    success, 2 for an error."""
    options = parse(argv)
    from ..compat.observe import hide_import_notes

    # the import of Megatron and fla would print warnings between the lines
    hide_import_notes()
    from .model import ENTRIES, find

    try:
        if options.name is None:
            lines = _model_lines(list(ENTRIES.values()))
        else:
            model = find(options.name)
            model.refuse_illegal_sizes(
                options.tp, options.cp, options.ep, options.length
            )
            if options.flags:
                lines = _flag_lines(model, options)
            else:
                lines = _figure_lines(model, options)
        print("\n".join(lines))
    except (ValueError, NotImplementedError) as error:
        return print_error(error)
    return 0


def launch_flags(model: Model, options: argparse.Namespace) -> list[str]:
    """The flags of a Megatron launch of ``model``: model, precision, length and
    parallel sizes, but no data. ``options`` are those of the command line."""
    from ..hf.build import megatron_flags

    flags = "--bf16 --use-distributed-optimizer"
    # machines without APEX need this flag
    flags += " --no-gradient-accumulation-fusion"
    flags += (
        f" --seq-length {options.length} --max-position-embeddings {options.length}"
    )
    flags += f" --micro-batch-size 1 --tensor-model-parallel-size {options.tp}"
    flags += " --sequence-parallel" if options.tp > 1 else ""
    flags += f" --context-parallel-size {options.cp}"
    if "E" in model.pattern:
        # The default of the expert-tensor-parallel size is the tensor-parallel size.
        flags += f" --expert-model-parallel-size {options.ep} --expert-tensor-parallel-size 1"
        flags += " --moe-token-dispatcher-type alltoall"
    return megatron_flags(model.hf, options.model) + flags.split()


def _flag_lines(model: Model, options: argparse.Namespace) -> Iterator[str]:
    """Yield the launch flags as lines of a shell command: each line is a flag with its
    values."""
    flag_and_values: list[str] = []
    for word in launch_flags(model, options):
        if word.startswith("--") and flag_and_values:
            yield f"{shlex.join(flag_and_values)} \\"
            flag_and_values = []
        flag_and_values.append(word)
    yield shlex.join(flag_and_values)


def _figure_lines(model: Model, options: argparse.Namespace) -> Iterator[str]:
    """Yield the printed lines of one model: parameters, FLOPs, memory and legal
    parallel sizes."""
    tp = options.tp
    cp = options.cp
    length = options.length
    stack = model.stack
    counts = {symbol: model.pattern.count(symbol) for symbol in _LAYER_NAMES}
    parameters = _format_count(stack.parameters)
    active = _format_count(stack.active_parameters)
    flops = stack.flops([length])
    yield f"{model.name} ({model.architecture}; from {model.source})"
    layers = [f"{n} {_LAYER_NAMES[symbol]}" for symbol, n in counts.items() if n]
    yield f"  layers        {', '.join(layers)}"
    yield f"  parameters    {parameters}, {active} of them for a token"
    yield (
        f"  FLOPs         {flops.forward / length / 1e9:.2f} G for a token forward, "
        f"{flops.step / length / 1e9:.2f} G with backward, in one document of {length} "
        "tokens"
    )
    flops_of_parts = [
        f"{part} {count / length / 1e9:.3f}" for part, count in flops._asdict().items()
    ]
    yield f"                {', '.join(flops_of_parts)}"
    yield (
        f"  state         {stack.state_bytes / 2**20:.1f} MiB for a sequence (fp32), "
        f"and {stack.conv_bytes / 2**10:.0f} KiB of convolutions (bf16)"
    )
    if counts["G"]:
        tokens_of_layers = counts["G"] * (length // cp)
        saved = {}
        for recompute in ("none", "light", "full", "layer"):
            saved_bytes = tokens_of_layers * model.saved_bytes(tp, recompute)
            saved[recompute] = f"{saved_bytes / 2**30:.2f}"
        yield (
            f"  activations   {saved['none']} GiB for a GPU's Gated DeltaNet layers, "
            f"{saved['light']} with recompute=light, {saved['full']} with "
            f"recompute=full, {saved['layer']} with --recompute-modules gdn"
        )
    yield f"  legal tp      {_join_sizes(model.tensor_parallel_sizes())}"
    yield f"  legal cp      any; headwise with tp {tp}: {_join_sizes(model.headwise_sizes(tp))}"
    yield f"  legal ep      {_join_sizes(model.expert_parallel_sizes())}"


def _model_lines(models: list[Model]) -> Iterator[str]:
    """Yield the lines of a printed table of ``models``, a line for each model."""
    yield f"{'model':25} {'parameters':>12} {'for a token':>12}  tp up to  layers"
    for model in models:
        layers = [
            f"{model.pattern.count(symbol)} {symbol}"
            for symbol in _LAYER_NAMES
            if symbol in model.pattern
        ]
        parameters = _format_count(model.stack.parameters)
        active = _format_count(model.stack.active_parameters)
        largest_tp = model.tensor_parallel_sizes()[-1]
        yield (
            f"{model.name:25} {parameters:>12} {active:>12} {largest_tp:9}  "
            f"{', '.join(layers)}"
        )


def _format_count(number: int) -> str:
    """``number`` in billions or millions, such as "35.10 B" or "12.00 M"."""
    if number >= 1e8:
        return f"{number / 1e9:.2f} B"
    return f"{number / 1e6:.2f} M"


def _join_sizes(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line ``argv`` (None: of the process)."""
    parser = Parser("python -m megatron_gdn.models", description=_DESCRIPTION)
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="of a model, such as Qwen3.5-35B-A3B")
    add("--tp", type=int, default=1, help="tensor-parallel size (1)")
    add("--cp", type=int, default=1, help="context-parallel size (1)")
    add("--ep", type=int, default=1, help="expert-parallel size (1)")
    add("--length", type=int, default=4096, help="tokens of a sequence (4096)")
    add("--model", choices=("hybrid", "gpt"), default="hybrid", help="of the flags")
    add("--flags", action="store_true", help="flags for a launch, to paste")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
