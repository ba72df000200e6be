"""The run itself: start Megatron, train, save, sample."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import NoReturn

import torch

from pretraining.arguments import parse_args
from pretraining.checkpoint import load_checkpoint, save_checkpoint
from pretraining.corpus import read_paths, standard_library
from pretraining.failures import fail, full_disk, refuse
from pretraining.feed import Feed
from pretraining.held_out import held_out_loss, hold_out
from pretraining.hf_model import load_pretrained
from pretraining.report import Report, closing_words, how_to_go_on
from pretraining.sampling import sample
from pretraining.stopping import Stop


def main(stop: Stop) -> None:
    args = parse_args()
    try:
        corpus = read_paths(args.data) if args.data else standard_library()
    except (OSError, ValueError) as error:
        refuse(str(error))
    try:
        device = start_distributed(args)
        share_places(args)
        train(args, corpus, device, stop)
    except Exception as error:
        give_up(error, args)
    torch.distributed.destroy_process_group()


def give_up(error: Exception, args) -> NoReturn:
    """Say in one line what ended the run and what is left of it."""
    way_on = how_to_go_on(args)
    full = full_disk(error, args.save)
    if full:
        refuse(f"{full}; {way_on}")
    fail(error, args.output_dir, way_on)


def share_places(args) -> None:
    """Every rank writes where rank 0 found room."""
    places = [(args.output_dir, args.save, args.tensorboard_dir)]
    torch.distributed.broadcast_object_list(places, src=0)
    args.output_dir, args.save, args.tensorboard_dir = places[0]


def start_distributed(args) -> torch.device:
    """Process groups, random seeds and the device of this rank."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.extensions.transformer_engine import HAVE_TE

    from megatron_gdn.compat.megatron_on_cpu import (
        resume_distributed_optimizer_with_torch_adam,
        run_megatron_on_cpu,
        use_torch_norm_after_the_last_hybrid_layer,
    )

    has_gpu = torch.cuda.is_available()
    if has_gpu:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if local_rank >= torch.cuda.device_count():
            refuse(
                f"every process needs a GPU of its own, and there are "
                f"{torch.cuda.device_count()}. Launch `torchrun --nproc_per_node="
                f"{torch.cuda.device_count()} ...` with parallel sizes to match, or hide the GPUs "
                "with CUDA_VISIBLE_DEVICES= to run on the CPU."
            )
        torch.cuda.set_device(local_rank)
        use_torch_norm_after_the_last_hybrid_layer()
        resume_distributed_optimizer_with_torch_adam()
    else:
        torch.set_num_threads(1)
        run_megatron_on_cpu()
    if args.transformer_impl == "auto":
        args.transformer_impl = "transformer_engine" if HAVE_TE else "local"
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
        torch.use_deterministic_algorithms(True)

    # Without torchrun this process is the whole world.
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29500")
    torch.distributed.init_process_group("nccl" if has_gpu else "gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
    )
    torch.manual_seed(args.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")


def train(args, corpus, device: torch.device, stop: Stop) -> None:

    from pretraining.model import build_training

    training = build_training(args)
    training_corpus, held_out = hold_out(corpus)
    feed = Feed.of(args, training_corpus, device, shuffle=args.shuffle)
    first = start_from(args, training, feed)
    report = Report(
        args.output_dir,
        args.tensorboard_dir,
        first=first,
        last=args.train_iters,
        active=torch.distributed.get_rank() == 0,
    )
    report.say(describe(args, corpus, training, device, first))
    with stop.at_step_boundaries():
        iteration = run_steps(args, training, feed, device, stop, report, first)
    report.close()
    if stop.reason:
        report.say(f"stopped by {stop.reason}; {how_to_go_on(args)}")
        return
    report.say(held_out_loss(args, training, held_out, device, forward_step))
    if args.sample_tokens:
        report.say(text_sample(args, training))
    report.say(closing_words(args, iteration))


def text_sample(args, training) -> str:
    """What the model writes, and how fast; or why it writes nothing."""
    try:
        text, rate = sample(
            training.model,
            args.sample_prompt,
            args.sample_tokens,
            args.sample_temperature,
            seed=args.seed,
        )
    except NotImplementedError as error:
        return f"no sample: {error}"
    return f"--- sample ---\n{text}\n--------------\nwritten at {rate:.1f} tokens/s"


def start_from(args, training, feed: Feed) -> int:
    """Steps already done: what the checkpoint to continue from says, or none."""
    if not args.start:
        if args.pretrained_checkpoint:
            load_pretrained(args.pretrained_checkpoint, training)
        return 0
    try:
        return load_checkpoint(args.start, args, training, feed)
    except ValueError as error:
        refuse(str(error))


def run_steps(args, training, feed, device, stop: Stop, report: Report, first: int) -> int:
    """Train until the last step or until some rank is asked to stop; returns the step it is at.

    Whatever the end, that step's checkpoint is on disk.
    """
    for iteration in range(first + 1, args.train_iters + 1):
        measured = train_step(args, training, feed, device)
        try:
            report.step(iteration=iteration, **measured)
        except OSError as error:
            full = full_disk(error, args.output_dir)
            stop.request(full or f"{args.output_dir} cannot be written ({error})")
        is_end = stop.agreed(device) or iteration == args.train_iters
        if is_end or (args.save_interval and iteration % args.save_interval == 0):
            place = save_checkpoint(args.save, iteration, training, feed, args.settings_json)
            report.say(f"saved {place}")
        if is_end:
            return iteration
    return first


def train_step(args, training, feed: Feed, device: torch.device) -> dict[str, float]:
    """One optimizer step; returns what `Report.step` records."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    started = time.perf_counter()
    training.model.zero_grad_buffer()
    training.optimizer.zero_grad()
    # A packed buffer is one row of micro_batch_size x seq_length tokens.
    rows = 1 if args.packing else args.micro_batch_size
    sums = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=feed,
        model=training.model,
        num_microbatches=args.num_micro_batches,
        seq_length=args.micro_batch_size * args.seq_length // rows,
        micro_batch_size=rows,
    )
    lr = training.optimizer.param_groups[0]["lr"]
    _, grad_norm, _ = training.optimizer.step()
    training.scheduler.step(increment=1)

    total = torch.zeros(2, device=device)
    for part in sums:  # empty on all but the last pipeline stage
        total += part
    torch.distributed.all_reduce(
        total, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    torch.distributed.broadcast(
        total,
        parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    loss_sum, tokens = total.tolist()
    return {
        "loss": loss_sum / tokens,
        "lr": lr,
        "grad_norm": float(grad_norm or 0.0),
        "tokens": int(tokens),
        "seconds": time.perf_counter() - started,
    }


def forward_step(feed: Feed, model):
    """Megatron's forward step: the model's per-token losses, and how to reduce them."""
    batch = next(feed)
    loss_per_token = model(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels,
        packed_seq_params=batch.packed_seq_params,
    )
    return loss_per_token, partial(masked_sum, batch.loss_mask)


def masked_sum(loss_mask: torch.Tensor, loss_per_token: torch.Tensor):
    """Sum of the losses that count (fp32), how many there are, and both for the report."""
    total = (loss_per_token.float() * loss_mask).sum()
    tokens = loss_mask.sum()
    return total, tokens.to(torch.int), torch.stack((total.detach(), tokens))


def describe(args, corpus, training, device: torch.device, first: int) -> str:
    parameters = sum(p.numel() for p in training.model.parameters())
    steps = f"steps {first + 1}..{args.train_iters}" if first else f"{args.train_iters} steps"
    if first == args.train_iters:
        steps = f"step {first} is reached (--train-iters {2 * first} would go on), steps"
    skipped = f", {len(corpus.skipped)} files that are not text skipped" if corpus.skipped else ""
    return (
        f"{args.hybrid_layer_pattern}: {parameters / 1e6:.2f} M parameters on rank 0, "
        f"{'bf16' if args.bf16 else 'fp32'} on {device.type}, tp {args.tensor_model_parallel_size} "
        f"cp {args.context_parallel_size} pp {args.pipeline_model_parallel_size} "
        f"dp {args.data_parallel_size}, {args.transformer_impl} modules\n"
        f"{len(corpus.documents)} documents, {corpus.num_bytes / 1e6:.1f} MB{skipped}; {steps} of "
        f"{args.global_batch_size} x {args.seq_length} tokens, "
        f"{'packed' if args.packing else 'dense'}"
    )
