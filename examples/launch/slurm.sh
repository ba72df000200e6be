#!/usr/bin/env bash
# Slurm: sbatch --nodes=2 examples/launch/slurm.sh pretrain_hybrid.py FLAGS, from the clone's folder.
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
set -euo pipefail
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export HEAD=${hosts[0]:?scontrol named no host of "$SLURM_JOB_NODELIST"}
export NODES=$SLURM_NNODES GPUS=${GPUS:-8} PORT=${PORT:-$((20000 + SLURM_JOB_ID % 10000))}
# Each task knows which node it is only once it runs there.
srun --kill-on-bad-exit=1 bash -c 'NODE=$SLURM_NODEID exec examples/launch/several_nodes.sh "$@"' _ "$@"
