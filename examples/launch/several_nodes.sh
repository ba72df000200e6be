#!/usr/bin/env bash
# Several nodes, on each of them:
#   NODES=2 NODE=0 HEAD=name_of_node_0 examples/launch/several_nodes.sh pretrain_hybrid.py FLAGS
# NODE counts from 0. HEAD:PORT is where the nodes meet, GPUS the number of processes on each.
set -euo pipefail
: "${NODES:?how many nodes}" "${NODE:?which of them this is, from 0}" "${HEAD:?the name of node 0}"
exec torchrun --nnodes "$NODES" --node-rank "$NODE" --nproc-per-node "${GPUS:-8}" \
    --master-addr "$HEAD" --master-port "${PORT:-29500}" -m megatron_gdn.launch "$@"
