#!/usr/bin/env bash
# Megatron's own pretrain_hybrid.py, with our layer and with Megatron's, in calls of less than ten
# minutes. MEGATRON_LM is a clone of Megatron-LM, CLONES a folder with the clones mlm-core (branch
# core_r0.19.0), mlm-main and mlm-dev. Records, logs and the table go to runs/launches.
#
#   benchmarks/launches.sh MEGATRON_LM [--rows 2x4096 fp8 ..]   one GPU: time of a step, resumed runs
#   benchmarks/launches.sh laws CLONES --compile                four GPUs: losses from one checkpoint
#   benchmarks/launches.sh times CLONES                         four GPUs: time of a step
#   benchmarks/launches.sh table RECORDS                        the table of docs/support.md
set -eu
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH=$here/..:${PYTHONPATH:-} OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
case ${1:-} in
laws | times | table) ;;
*) set -- one "$@" ;;
esac
exec "${PYTHON:-python3}" "$here/launches.py" "$@"
