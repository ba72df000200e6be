"""Generate with the model of a Hugging Face folder: ``python examples/generate.py HF_FOLDER``.

Loads the weights into a Megatron HybridModel on one rank, prefills the prompt and decodes one token
after the other from what the layers carry. Needs a tokenizer only for ``--text``.
"""

import argparse
import time

import torch

from megatron_gdn.compat.quiet import hide_import_notes

hide_import_notes()

from megatron_gdn.compat.one_process import end_one_process, start_one_process
from megatron_gdn.hf import build_model, load_hf_weights, read_hf_config
from megatron_gdn.inference.generate import generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="config.json and safetensors of Qwen3-Next or Qwen3.5")
    parser.add_argument("--tokens", type=int, nargs="+", default=[0], help="prompt, as numbers")
    parser.add_argument("--text", help="prompt, as text; the folder needs its tokenizer")
    parser.add_argument("--count", type=int, default=32, help="tokens to append")
    args = parser.parse_args()

    device = start_one_process()
    hf, tokenizer = read_hf_config(args.folder), None
    model, _ = build_model(hf, modules="local", parallel_output=False)
    load_hf_weights(model, args.folder)
    model.to(device)
    if args.text is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.folder)
        args.tokens = tokenizer(args.text)["input_ids"]

    def likeliest(logits: torch.Tensor) -> torch.Tensor:
        return logits[:, : hf.vocab_size].argmax(-1)

    prompt = torch.tensor([args.tokens], device=device)
    begin = time.perf_counter()
    tokens = generate(model, prompt, args.count, pick=likeliest)[0].tolist()
    rate = args.count / (time.perf_counter() - begin)
    print(tokenizer.decode(tokens) if tokenizer else " ".join(map(str, tokens)))
    print(f"{args.count} tokens at {rate:.1f} tokens/s")

    end_one_process()


if __name__ == "__main__":
    main()
