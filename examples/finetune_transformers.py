"""Train a tiny transformers Qwen3.5 on packed documents over context-parallel ranks.

    torchrun --nproc_per_node=2 examples/finetune_transformers.py

The model is made from a config; with real weights, load it by ``from_pretrained``
within ``megatron_gdn.hf.gates_in_fp32()``. Runs on the CPU (gloo, fp32) and on GPUs
(nccl, bf16).
"""

from __future__ import annotations

import argparse
import inspect
import os
import textwrap

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_gdn.compat.observe import hide_import_notes

hide_import_notes()

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from megatron_gdn.hf import (
    PackingCollator,
    assert_no_packing_leak,
    context_parallel_share,
    patch,
    shard_gates,
)


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--layout",
        default="zigzag_buffer",
        choices=["zigzag_buffer", "contiguous"],
        help="how ranks share the tokens",
    )
    parser.add_argument(
        "--fully-shard", action="store_true", help="torch's FSDP2 over all ranks"
    )
    return parse(parser)


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """The flags of both examples of training a transformers model."""
    parser = argparse.ArgumentParser(
        description=(doc or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    for name, default, meaning in (
        ("--steps", 30, "optimizer steps"),
        ("--documents", 6, "packed into a row"),
        ("--hidden", 64, "channels"),
    ):
        parser.add_argument(name, type=int, default=default, metavar="N", help=meaning)
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line; a request that cannot work ends the program before a model is
    made."""
    args = parser.parse_args()
    for name, most in (
        ("steps", None),
        ("documents", len(texts()) - 1),
        ("hidden", None),
    ):
        number = getattr(args, name)
        if number < 1 or (most and number > most):
            parser.error(
                f"--{name} {number}: use 1 {f'to {most}' if most else 'or more'}."
            )
    if "RANK" not in os.environ:
        parser.error(f"start it by torchrun --nproc_per_node=2 examples/{parser.prog}")
    return args


def tiny_model(hidden: int) -> Qwen3_5ForCausalLM:
    torch.manual_seed(0)  # the same on every rank
    config = Qwen3_5TextConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    )
    return Qwen3_5ForCausalLM(config)


def texts() -> list[dict[str, list[int]]]:
    """The functions of a module of Python's standard library, as bytes."""
    pieces = inspect.getsource(textwrap).split("\n\n")
    return [
        {"input_ids": list(piece.encode()[:200])} for piece in pieces if len(piece) > 20
    ]


def shard(model: Qwen3_5ForCausalLM, mesh) -> None:
    """Shard the fp32 gates by themselves, then layer by layer."""
    shard_gates(model, mesh=mesh)
    policy = MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def main() -> None:
    args = arguments()
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank = dist.get_rank()
    size = dist.get_world_size()
    device = (
        torch.device("cuda", rank % torch.cuda.device_count())
        if gpu
        else torch.device("cpu")
    )
    if gpu:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("cp",))

    # transformers types `to` as a plain function.
    model = tiny_model(args.hidden).to(device, torch.bfloat16 if gpu else torch.float32)  # pyright: ignore[reportArgumentType]
    with patch(model):  # every rank for itself
        assert_no_packing_leak(model)
    patch(model, mesh, cp_layout=args.layout, attention="gathered")
    if args.fully_shard:
        shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    collate = PackingCollator(pad_to_multiple_of=2 * size)
    documents = texts()
    if rank == 0:
        print("no packed document reaches another")

    for step in range(args.steps):
        first = step * args.documents % (len(documents) - args.documents)
        batch = collate(documents[first : first + args.documents])
        count = (batch["shift_labels"] >= 0).sum()
        share = context_parallel_share(batch, mesh, args.layout)
        share = {k: v.to(device) if torch.is_tensor(v) else v for k, v in share.items()}
        labels = share.pop("shift_labels")
        del share["labels"]
        logits = model(**share, use_cache=False).logits.float()
        loss = (
            F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            / count
        )
        # fully_shard averages over the ranks, whose gradients are to be summed.
        (loss * size if args.fully_shard else loss).backward()
        if not args.fully_shard:
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            tokens = batch["input_ids"].shape[1]
            print(
                f"step {step:3}  loss {total.item():.4f}  {tokens} tokens on {size} "
                "ranks"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
