#!/usr/bin/env bash
# One node: examples/launch/one_node.sh pretrain_hybrid.py FLAGS. GPUS is the number of processes.
# Megatron's own layers are built as ours: docs/adopting.md.
set -euo pipefail
exec torchrun --standalone --nproc-per-node "${GPUS:-8}" -m megatron_gdn.launch "$@"
