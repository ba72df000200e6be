"""Pretrain a small Megatron HybridModel with Gated DeltaNet layers on real text.

    python examples/pretrain_hybrid.py --nproc-per-node 2

trains three Gated DeltaNet layers and an attention layer, each with an MLP, with
context parallelism over two ranks, on the source of Python's standard library, byte by
byte, every file a sequence of its own in a packed buffer. It ends with the loss on
held-out files. The same command runs on GPUs (nccl, bf16) and on a CPU (gloo, fp32).
Without --nproc-per-node it is one process; torchrun can start it too, on several
machines.

Everything around the layer is Megatron-Core's: process groups, HybridModel, distributed
data parallel, optimizer and schedule, pipeline schedule, distributed checkpoints.
"""

if __name__ == "__main__":
    # Imported here: a helper process of Megatron may import this file again.
    import sys

    from pretraining.flags import make_parser
    from pretraining.launch import launch, processes_to_start

    make_parser().parse_args()  # a wrong flag ends the run here, before torch is loaded
    processes = processes_to_start(sys.argv[1:])
    if processes > 1:
        sys.exit(launch(processes, sys.argv[0], sys.argv[1:]))

    from pretraining.quiet import hide_import_notes, say_what_takes_time
    from pretraining.stopping import Stop

    stop = Stop()
    say_what_takes_time()
    hide_import_notes()

    from pretraining.loop import main

    main(stop)
