"""The run itself: start Megatron, train, save, sample."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import NoReturn

import torch

from pretraining.arguments import parse_args
from pretraining.checkpoint import load_checkpoint, save_checkpoint
from pretraining.corpus import read_paths, standard_library
from pretraining.failures import fail, first_line, full_disk, is_echo, refuse
from pretraining.feed import Feed
from pretraining.flags import with_flags
from pretraining.going_on import closing_words, how_to_go_back, how_to_go_on
from pretraining.held_out import held_out_loss, hold_out
from pretraining.hf_model import load_pretrained
from pretraining.launch import NPROC
from pretraining.report import Report
from pretraining.roll_call import RollCall
from pretraining.sampling import sample
from pretraining.step import NotFiniteError, train_step
from pretraining.stopping import Stop


def main(stop: Stop) -> None:
    args = parse_args()
    try:
        corpus = read_paths(args.data) if args.data else standard_library()
    except (OSError, ValueError) as error:
        refuse(str(error))
    roll_call = RollCall()
    try:
        device = start_distributed(args)
        roll_call.start(60 * args.distributed_timeout_minutes)
        share_places(args)
        train(args, corpus, device, stop, roll_call)
    except NotFiniteError as fault:
        roll_call.end()
        refuse(f"{fault}; {how_to_go_back(args, fault.weights_step)}")
    except Exception as error:
        give_up(error, args, roll_call)
    roll_call.end()
    torch.distributed.destroy_process_group()


def give_up(error: Exception, args, roll_call: RollCall) -> NoReturn:
    """Print in one line what ended the run and how to go on."""
    way_on = how_to_go_on(args)
    full = full_disk(error, args.save)
    if full:
        roll_call.end()
        refuse(f"{full}; {way_on}")
    said = with_flags(first_line(error))
    others = roll_call.ask() if is_echo(error) else None
    if others:
        said = f"{others} ({said})"
    fail(error, said, args.output_dir, way_on)


def share_places(args) -> None:
    """Send rank 0's folders to all ranks."""
    places = [(args.output_dir, args.save, args.tensorboard_dir)]
    torch.distributed.broadcast_object_list(places, src=0)
    args.output_dir, args.save, args.tensorboard_dir = places[0]


def start_distributed(args) -> torch.device:
    """Process groups, random seeds and the device of this rank."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.extensions.transformer_engine import HAVE_TE

    from megatron_gdn.compat.one_process import (
        resume_distributed_optimizer_with_torch_adam,
        run_megatron_on_cpu,
        use_torch_norm_after_the_last_hybrid_layer,
    )

    has_gpu = torch.cuda.is_available()
    if has_gpu:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if local_rank >= torch.cuda.device_count():
            refuse(
                "every process needs a GPU of its own, and there are "
                f"{torch.cuda.device_count()}. Use {NPROC} {torch.cuda.device_count()} "
                "with parallel sizes to match, or hide the GPUs with "
                "CUDA_VISIBLE_DEVICES= to run on the CPU."
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

    backend = "nccl" if has_gpu else "gloo"
    limit = timedelta(minutes=args.distributed_timeout_minutes)
    if "RANK" in os.environ:
        torch.distributed.init_process_group(backend, timeout=limit)
    else:  # this process is the whole world
        store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]  # a documented name
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
    )
    torch.manual_seed(args.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    return (
        torch.device("cuda", torch.cuda.current_device())
        if has_gpu
        else torch.device("cpu")
    )


def train(args, corpus, device: torch.device, stop: Stop, roll_call: RollCall) -> None:
    from pretraining.model import build_training

    try:
        training = build_training(args)
    except (ValueError, NotImplementedError) as error:
        # Megatron adds which modules it was building.
        refuse(with_flags(str(error).partition(" when instantiating ")[0]))
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
    try:
        with stop.at_step_boundaries():
            iteration = run_steps(
                args, training, feed, device, stop, report, roll_call, first
            )
        if not stop.reason:
            loss, words = held_out_loss(args, training, held_out, device)
            report.held_out(loss)
            report.say(words)
    except NotFiniteError:
        report.close()  # the curve shows how the run came to it
        raise
    report.close()
    if stop.reason:
        report.say(f"stopped by {stop.reason}; {how_to_go_on(args)}")
        return
    if args.sample_tokens:
        report.say(text_sample(args, training))
    report.say(closing_words(args, iteration))


def text_sample(args, training) -> str:
    """The text that the model writes, and its speed; or the reason why there is
    none."""
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
    except FloatingPointError as error:
        raise NotFiniteError(
            f"{error} after step {args.train_iters}", weights_step=args.train_iters
        ) from error
    return f"--- sample ---\n{text}\n--------------\nwritten at {rate:.1f} tokens/s"


def start_from(args, training, feed: Feed) -> int:
    """Restore the checkpoint to continue from, if there is one; returns the steps
    already done."""
    if not args.start:
        if args.pretrained_checkpoint:
            load_pretrained(args.pretrained_checkpoint, training)
        return 0
    try:
        return load_checkpoint(args.start, args, training, feed)
    except ValueError as error:
        refuse(str(error))


def run_steps(
    args,
    training,
    feed,
    device,
    stop: Stop,
    report: Report,
    roll_call: RollCall,
    first: int,
) -> int:
    """Train until the last step or until some rank is asked to stop; returns the step
    it is at.

    That step's checkpoint is then on disk.
    """
    for iteration in range(first + 1, args.train_iters + 1):
        measured = train_step(args, training, feed, device, iteration)
        try:
            report.step(iteration=iteration, **measured)
        except OSError as error:
            full = full_disk(error, args.output_dir)
            stop.request(full or f"{args.output_dir} cannot be written ({error})")
        is_end = stop.agreed(device) or iteration == args.train_iters
        if is_end or (args.save_interval and iteration % args.save_interval == 0):
            place = save_checkpoint(
                args.save, iteration, training, feed, args.settings_json
            )
            report.say(f"saved {place}")
        roll_call.note_step()
        if is_end:
            return iteration
    return first


def describe(args, corpus, training, device: torch.device, first: int) -> str:
    parameters = sum(p.numel() for p in training.model.parameters())
    steps = (
        f"steps {first + 1}..{args.train_iters}"
        if first
        else f"{args.train_iters} steps"
    )
    if first == args.train_iters:
        steps = (
            f"step {first} is reached (--train-iters {2 * first} would go on), steps"
        )
    skipped = (
        f", {len(corpus.skipped)} files that are not text skipped"
        if corpus.skipped
        else ""
    )
    return (
        f"{args.hybrid_layer_pattern}: {parameters / 1e6:.2f} M parameters on rank 0, "
        f"{'bf16' if args.bf16 else 'fp32'} on {device.type}, tp "
        f"{args.tensor_model_parallel_size} "
        f"cp {args.context_parallel_size} pp {args.pipeline_model_parallel_size} "
        f"dp {args.data_parallel_size}, {args.transformer_impl} modules\n"
        f"{len(corpus.documents)} documents, {corpus.num_bytes / 1e6:.1f} "
        f"MB{skipped}; {steps} of "
        f"{args.global_batch_size} x {args.seq_length} tokens, "
        f"{'packed' if args.packing else 'dense'}\n{words_of_schedule(args)}"
    )


def words_of_schedule(args) -> str:
    return (
        f"learning rate {args.lr:g}{args.lr_note} after {args.lr_warmup_iters} steps "
        f"of warm-up, {args.min_lr:g} at the end"
    )
