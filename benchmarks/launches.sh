#!/usr/bin/env bash
# Megatron's own pretrain_hybrid.py on one GPU, with our layer and with Megatron's, in less than ten
# minutes. MEGATRON_LM is a clone of Megatron-LM; records, logs and the table go to runs/launches.
#
#   benchmarks/launches.sh MEGATRON_LM [--rows 2x4096 fp8 ..] [--rounds 2] [--out FOLDER]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH=$here/..:${PYTHONPATH:-} OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" "$here/launches.py" "$@"
