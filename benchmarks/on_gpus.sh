#!/usr/bin/env bash
# Everything the docs say of GPUs, checked and measured again, in parts of at most ten minutes:
#
#   benchmarks/on_gpus.sh check     one GPU: the kernels, the mixer, states, determinism, padding
#   benchmarks/on_gpus.sh measure   one GPU: kernels, layers, what fp16 operands and bits that repeat cost
#   benchmarks/on_gpus.sh repeats   one GPU: the bits of hundreds of runs in two processes
#   benchmarks/on_gpus.sh parallel  four GPUs: both schemes of context parallelism, the exchange, their laws
#
# JSON lines and one log per step go to runs/on_gpus/PART, or to the folder that follows PART. A step
# that fails or outlasts its limit (its stack is in its log) does not keep the next from running.
set -u
cd "$(dirname "$0")/.."
part=${1:?check, measure, repeats or parallel}
out=${2:-runs/on_gpus/$part}
mkdir -p "$out"
export PYTHONPATH=$PWD:${PYTHONPATH:-} OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
failed=0

step() {  # NAME SECONDS COMMAND..
  local name=$1 limit=$2 began=$SECONDS rc=0
  shift 2
  timeout --signal=ABRT --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1 || rc=$?
  printf '\n== %s: %s in %s s\n' "$name" "$([ $rc = 0 ] && echo passed || echo "FAILED ($rc)")" $((SECONDS - began))
  tail -n "${LINES_SHOWN:-12}" "$out/$name.log" | cut -c1-300
  return $rc
}
laws() { step "$1" "$2" python3 -m pytest -m gpu -p no:cacheprovider --maxfail=5 "${@:3}"; }
bench() { step "$1" "$2" python3 "benchmarks/$3.py" --out "$out/$1.jsonl" "${@:4}"; }
ranks() { step "$1" "$2" torchrun --standalone --nproc-per-node 4 "benchmarks/$3.py" --out "$out/$1.jsonl" "${@:4}"; }
each() { local pid; for pid in "$@"; do wait "$pid" || failed=1; done; }

case $part in
check)
  laws kernels 280 tests/ops/fused/kernels & a=$!
  step compile 280 python3 benchmarks/compile_flash_qla.py 16:32 16:16 16:48 16:64 & b=$!
  step compile-fp16 280 python3 benchmarks/compile_flash_qla.py 16:32 --operands fp16 & c=$!
  each $a $b $c
  laws fp16 300 tests/ops/fused/test_gpu_mixer.py -k=fp16 & a=$!
  laws mixer 300 tests/ops/fused/test_gpu_mixer.py "-k=not fp16" & b=$!
  laws states 300 tests/ops/fused/test_gpu_states.py & c=$!
  laws one-gpu 300 tests/gpu/test_determinism.py tests/gpu/test_padding.py tests/gpu/test_exact_resume.py & d=$!
  each $a $b $c $d
  ;;
measure)
  bench kernels 60 bench_kernels --tokens 32768 8192 || failed=1
  bench layer 150 bench_layer --compile-first || failed=1
  bench fp16 120 bench_layer --layers ours ours-fp16 --cases 1x32768 thd32768 1x8192 || failed=1
  bench fla 120 bench_layer --core fla --cases 1x32768 --layers upstream ours || failed=1
  bench cost 120 bench_determinism --parts cost --ratios 2 || failed=1
  bench chunk 60 bench_chunk || failed=1
  CUBLAS_WORKSPACE_CONFIG=:4096:8 bench chunk-workspace 60 bench_chunk || failed=1
  ;;
repeats)
  bench repeats 480 bench_determinism --parts repeats --backends flash_qla || failed=1
  bench neighbours 100 bench_determinism --parts neighbours --backends flash_qla reference || failed=1
  ;;
parallel)
  step compile 150 python3 benchmarks/compile_flash_qla.py 16:32 8:16 4:8 2:4 || failed=1
  for tokens in 32768 thd32768 thd32768x512 131072; do
    ranks "$tokens" 80 bench_context_parallel --cases $tokens || failed=1
  done
  ranks exchange 60 bench_exchange --check --waves 1 || failed=1
  laws laws 300 tests/gpu/test_parallel.py tests/gpu/test_exchange.py || failed=1
  laws resume 100 tests/gpu/test_exact_resume.py || failed=1
  ;;
*)
  echo "no part '$part'; there are check, measure, repeats and parallel" >&2
  exit 2
  ;;
esac
exit $failed
