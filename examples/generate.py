"""Generate with the model of a Hugging Face folder:
``python examples/generate.py HF_FOLDER``.

Loads the weights into a Megatron HybridModel on one rank, prefills the prompt and
decodes token by token. Needs a tokenizer only for ``--prompt``.
"""

import argparse
import sys
import time
from pathlib import Path

from megatron_gdn.command_line import Parser, print_error

_WARM_UP = 3  # tokens, before the others are timed


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, with the model's config as ``hf``, the tokenizer or None, and
    the prompt.

    A request that cannot work ends the program in one line, before a model is built.
    """
    parser = Parser(
        "generate.py",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "folder", help="config.json and safetensors of Qwen3-Next or Qwen3.5"
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[0],
        metavar="ID",
        help="prompt, as numbers",
    )
    prompt.add_argument(
        "--prompt",
        default=argparse.SUPPRESS,
        metavar="TEXT",
        help=(
            "text in place of --tokens, and text is printed; the folder needs its "
            "tokenizer"
        ),
    )
    parser.add_argument(
        "--count", type=int, default=32, metavar="N", help="tokens to append"
    )
    args = parser.parse_args(argv)
    from megatron_gdn.compat.observe import hide_import_notes

    hide_import_notes()
    from megatron_gdn.hf import read_hf_config

    try:
        args.hf = read_hf_config(args.folder)
        args.tokenizer = None
        if "prompt" in args:
            args.tokenizer = _tokenizer(args.folder)
            args.tokens = args.tokenizer(args.prompt)["input_ids"]
        _check(args)
    except (ValueError, NotImplementedError, OSError) as error:
        sys.exit(print_error(error))
    return args


def _tokenizer(folder: str):
    # Without such files transformers makes a tokenizer that knows no word, and says
    # nothing.
    if not any(Path(folder).glob("tokenizer*")):
        raise ValueError(
            f"--prompt needs a tokenizer, and {folder} has none; use --tokens."
        )
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _check(args: argparse.Namespace) -> None:
    if args.count < 1:
        raise ValueError(f"--count {args.count}: use 1 or more.")
    if not args.tokens:
        raise ValueError(f"--prompt {args.prompt!r} is no token; give some text.")
    wrong = [token for token in args.tokens if not 0 <= token < args.hf.vocab_size]
    if wrong:
        raise ValueError(
            f"token {wrong[0]} is not of this model, whose {args.hf.vocab_size} tokens "
            f"are 0 to {args.hf.vocab_size - 1}."
        )
    if not any(Path(args.folder).glob("*.safetensors")):
        raise ValueError(f"{args.folder} has no weights (*.safetensors).")


def main() -> None:
    args = arguments()
    import torch

    from megatron_gdn.compat.one_process import end_one_process, start_one_process
    from megatron_gdn.hf import build_model, load_hf_weights
    from megatron_gdn.inference.generate import generate

    device = start_one_process()
    model, _ = build_model(args.hf, modules="local", parallel_output=False)
    load_hf_weights(model, args.folder)
    model.to(device)

    def likeliest(logits: torch.Tensor) -> torch.Tensor:
        return logits[:, : args.hf.vocab_size].argmax(-1)

    prompt = torch.tensor([args.tokens], device=device)
    generate(model, prompt, _WARM_UP, pick=likeliest)  # compiles kernels, fills caches
    begin = time.perf_counter()
    tokens = generate(model, prompt, args.count, pick=likeliest)[0].tolist()
    rate = args.count / (time.perf_counter() - begin)
    print(
        args.tokenizer.decode(tokens) if args.tokenizer else " ".join(map(str, tokens))
    )
    print(
        f"{args.count} tokens at {rate:.1f} tokens/s, prompt included, after a warm-up"
    )

    end_one_process()


if __name__ == "__main__":
    main()
