"""The model and texts of finetune_transformers.py, trained by transformers' Trainer.

    torchrun --nproc_per_node=2 examples/finetune_with_trainer.py

Packed documents over context-parallel ranks; --replicas 2 on four ranks makes two
groups of two, each with its own batches. Wants accelerate. Runs on the CPU (gloo, fp32)
and on GPUs (nccl, bf16).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from finetune_transformers import make_parser, parse, texts, tiny_model
from torch.distributed.device_mesh import init_device_mesh
from transformers import Trainer, TrainerCallback, TrainingArguments

from megatron_gdn.hf import ContextParallelTrainerMixin, PackingCollator, patch


class CPTrainer(ContextParallelTrainerMixin, Trainer):
    pass


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, **kwargs) -> None:
        logs = kwargs["logs"]
        if state.is_world_process_zero and "loss" in logs:
            print(
                f"step {state.global_step:3}  loss {float(logs['loss']):.4f}",
                flush=True,
            )


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="groups with batches of their own",
    )
    parser.add_argument("--save", metavar="FOLDER", help="save the trained model here")
    args = parse(parser)
    ranks = int(os.environ["WORLD_SIZE"])
    if args.replicas < 1 or ranks % args.replicas:
        parser.error(f"--replicas {args.replicas} does not divide {ranks} ranks.")
    if args.save and Path(args.save).is_file():
        parser.error(f"--save {args.save} is a file; name a folder.")
    return args


def main() -> None:
    args = arguments()
    gpu = torch.cuda.is_available()
    settings = TrainingArguments(
        output_dir=args.save or "unused",
        max_steps=args.steps,
        save_strategy="no",
        per_device_train_batch_size=args.documents,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=10,
        logging_first_step=True,
        use_cpu=not gpu,
        bf16=gpu,
        dataloader_pin_memory=gpu,
        report_to="none",
        disable_tqdm=True,
    )
    device = settings.device  # whose first use makes the process group
    shape = (args.replicas, dist.get_world_size() // args.replicas)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "cp"))["cp"]
    model = tiny_model(args.hidden)
    patch(model, mesh, attention="gathered")
    trainer = CPTrainer(
        model,
        settings,
        train_dataset=texts(),
        data_collator=PackingCollator(pad_to_multiple_of=2 * mesh.size()),
        callbacks=[PrintLoss()],
    )
    trainer.train()
    if args.save:
        trainer.save_model(args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
