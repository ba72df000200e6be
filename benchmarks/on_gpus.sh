#!/usr/bin/env bash
# Everything the docs say of GPUs, checked and measured again, in parts of less than ten minutes:
#
#   benchmarks/on_gpus.sh check     one GPU: the kernels, the mixer, states, determinism, padding
#   benchmarks/on_gpus.sh measure   one GPU: kernels, layers, what fp16 operands and bits that repeat cost
#   benchmarks/on_gpus.sh shapes    one GPU, Transformer Engine: the shapes that users run
#   benchmarks/on_gpus.sh grid      one GPU: training and generation with the same bits
#   benchmarks/on_gpus.sh trees     one GPU, Transformer Engine: shared prefixes in a hybrid model
#   benchmarks/on_gpus.sh decode    one GPU, Transformer Engine: step kernels, a hybrid model's decode step
#   benchmarks/on_gpus.sh fp8       one GPU, Transformer Engine: layers and runs under FP8
#   benchmarks/on_gpus.sh kda       one GPU: Kimi Delta Attention beside fla's layer
#   benchmarks/on_gpus.sh gdn2      one GPU: Gated DeltaNet-2 beside Megatron main's layer
#   benchmarks/on_gpus.sh gdp       one GPU: Gated DeltaProduct beside Megatron main's layer
#   benchmarks/on_gpus.sh host      one GPU: the host's time, here and in the checkout OTHER=folder, in turn
#   benchmarks/on_gpus.sh repeats   one GPU: the bits of hundreds of runs in two processes
#   benchmarks/on_gpus.sh sanitize  one GPU or more: compute-sanitizer's tools over every kernel
#   benchmarks/on_gpus.sh parallel  four GPUs: both schemes of context parallelism, the exchange
#   benchmarks/on_gpus.sh rows      four GPUs: long rows of documents in every layout; the host's time of six
#                                   layers in a row, here and in the checkout OTHER=folder
#   benchmarks/on_gpus.sh laws      four GPUs: the laws of layers in parallel, and the repeats
#   benchmarks/on_gpus.sh models    four GPUs, Transformer Engine: whole models in parallel, and on one
#                                   GPU a model's step beside upstream's, eager and with graphs
#
# JSON lines and one log per step go to runs/on_gpus/PART, or to the folder that follows PART. A step
# that fails or outlasts its limit (its stack is in its log) does not keep the next from running.
# Steps that measure run alone; others share the GPU and 16 cores (64 with four GPUs). A cache that
# `python3 -m megatron_gdn.warm_up` filled elsewhere spares two minutes of each part.
set -u
cd "$(dirname "$0")/.."
part=${1:?check, measure, shapes, grid, trees, decode, fp8, kda, gdn2, gdp, host, repeats, sanitize, parallel, rows, laws or models}
out=${2:-runs/on_gpus/$part}
mkdir -p "$out"
export PYTHONPATH=$PWD:${PYTHONPATH:-} OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
ALL=570  # seconds for the whole part: no step goes on beyond
failed=0

step() {  # NAME SECONDS COMMAND..
  local name=$1 limit=$2 left=$((ALL - SECONDS)) began=$SECONDS rc=0
  shift 2
  if ((left < limit)); then limit=$left; fi
  if ((limit < 10)); then
    printf '\n== %s: NOT RUN, out of time\n' "$name"
    return 1
  fi
  timeout --signal="${SIGNAL:-ABRT}" --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1 || rc=$?
  printf '\n== %s: %s in %s s, at %s s\n%s\n' "$name" "$([ $rc = 0 ] && echo passed || echo "FAILED ($rc)")" \
    $((SECONDS - began)) $SECONDS "$(tail -n "${LINES_SHOWN:-12}" "$out/$name.log" | cut -c1-300)"
  return $rc
}
# In the background; `finish` waits for all that were started so.
pids=()
beside() { "$@" & pids+=($!); }
finish() { local pid; for pid in "${pids[@]}"; do wait "$pid" || failed=1; done; pids=(); }
laws() { step "$1" "$2" python3 -m pytest -m gpu -p no:cacheprovider --maxfail=5 --durations=5 "${@:3}"; }
bench() { step "$1" "$2" python3 benchmarks/run.py "$3" --out "$out/$1.jsonl" "${@:4}"; }
compile() {  # NAME SECONDS "HEADS.." "OPERANDS.." PARTS..: side by side
  step "$1" "$2" bash -c 'for heads in $1; do for operands in $2; do
    echo --heads $heads --operands $operands --uses ${3:-cut rows uncut states}
  done; done | xargs -P 16 -I{} sh -c "python3 -m megatron_gdn.warm_up --kernels flash_qla {}"' - "$3" "${4:-fp16 bf16}" "${*:5}"
}
# torchrun gives its ranks a session of their own and ends them at SIGTERM alone.
ranks() {
  SIGNAL=TERM step "$1" "$2" torchrun --standalone --nproc-per-node 4 benchmarks/run.py "${@:3}"
}

# Each on a GPU of its own, if there are so many.
bits() {
  local gpus=$(nvidia-smi --list-gpus | wc -l) heads n=0
  for heads in 16/16 16/32 16/64; do
    CUDA_VISIBLE_DEVICES=$((n++ % gpus)) beside bench "repeats-${heads/\//-}" 420 repeats \
      --layers flash_qla --cases "1x8192 $heads" "thd100,63,1,3932,4096 $heads"
  done
  CUDA_VISIBLE_DEVICES=$((3 % gpus)) beside bench neighbours 420 neighbours
  finish
}

case $part in
check)
  kernels=tests/kernels prepare=tests/kernels/test_front.py
  mixer=tests/gdn/test_gpu_mixer.py
  # fla tunes sixty kernels for each number of heads, and needs nothing that is compiled here.
  fla='fla and not flash_qla and not fp16' ratios='(-1-fla or -3-fla or -4-fla)'
  beside laws fla 560 $mixer -k "$fla and not $ratios"
  beside laws fla-ratios 560 $mixer -k "$fla and $ratios"
  slow=("${pids[@]}") pids=()
  # Triton compiles some 450 variants in four minutes of one core.
  beside laws kernels 240 $kernels --ignore=$prepare
  beside laws gradients 240 $prepare -k every_gradient
  beside laws factors 240 $prepare -k "factor and not every_gradient"
  beside laws prepare 240 $prepare -k "not every_gradient and not factor"
  beside compile compile 240 16:32
  beside compile compile-ratios 240 "16:16 16:48 16:64" "fp16 bf16" uncut
  finish
  pids=("${slow[@]}")
  beside laws fp16 310 $mixer -k fp16
  beside laws mixer 310 $mixer -k "not fp16 and not ($fla)"
  beside laws states 310 tests/gdn/test_gpu_states.py
  beside laws one-gpu 310 tests/gpu/test_padding.py tests/gpu/test_exact_resume.py
  finish
  ;;
measure)
  # megatron-core's layer hands FlashQLA other dtypes and head counts: it compiles by running.
  for case in 1x32768 1x8192 8x4096 thd32768; do
    beside step "compile-$case" 200 python3 benchmarks/run.py layer --compile-only --layers upstream --cases $case
  done
  for layer in upstream ours; do
    beside step "compile-fla-$layer" 200 python3 benchmarks/run.py layer --compile-only --set core=fla \
      --layers $layer --cases 1x32768
  done
  beside compile compile 200 16:32
  finish
  bench kernels 60 kernels || failed=1
  bench layer 180 layer || failed=1
  bench cost 120 determinism-cost || failed=1
  bench fla 120 layer --set core=fla --cases 1x32768 --layers upstream ours || failed=1
  ;;
shapes)
  beside compile compile 240 "16:32 4:8 2:4 8:32 4:12" bf16 cut uncut rows again
  beside compile compile-fp16 240 "16:32 4:8 2:4 8:32 4:12" fp16 cut uncut rows again
  beside step compile-upstream 240 python3 benchmarks/compile_upstream.py 32 8 4 12
  finish
  bench shapes 560 shapes --seconds 320 || failed=1
  ;;
grid)
  compile compile 240 16:32 "fp16 bf16" whole cut || failed=1
  laws exact 200 tests/gpu/test_exact_generation.py tests/inference/test_gpu_aligned.py || failed=1
  bench grid 120 grid || failed=1
  bench decode-grid 60 decode || failed=1
  ;;
trees)
  compile compile 150 "16:32 2:4"
  laws shared-prefix 120 tests/gpu/test_shared_prefix.py || failed=1
  bench trees 300 trees || failed=1
  ;;
decode)
  laws kernels 150 tests/kernels/test_step.py || failed=1
  laws precision 100 tests/inference/test_gpu_precision.py || failed=1
  bench decode 240 decode-model --seconds 200 || failed=1
  bench local 150 decode-model --set modules=local batches=[32,256] --seconds 110 || failed=1
  ;;
fp8)
  beside compile compile 240 "16:32 16:64"
  beside step compile-upstream 240 python3 benchmarks/compile_upstream.py 32 64
  finish
  beside laws fp8 200 tests/gpu/test_fp8.py
  beside laws fp8-runs 200 tests/gpu/test_fp8_runs.py
  finish
  bench fp8 100 fp8 --seconds 85 || failed=1
  bench errors 60 fp8-errors --seconds 50 || failed=1
  ;;
kda)
  laws kda 240 tests/gpu/test_fla_rules.py -k kda || failed=1
  bench kda 320 kda --set lower_bound=-5.0 configurations=2 --kernels 25 --seconds 300 || failed=1
  ;;
gdn2)
  laws gdn2 240 tests/gpu/test_fla_rules.py -k gdn2 || failed=1
  bench gdn2 320 gdn2 --set configurations=2 --seconds 300 || failed=1
  ;;
gdp)
  compile compile 240 8:32 bf16 || failed=1
  bench gdp 300 gdp --set configurations=2 --kernels 12 --seconds 280 || failed=1
  laws gdp 200 tests/gpu/test_gdp.py || failed=1
  ;;
host)
  other=$(cd "${OTHER:?a checkout of another commit}" && pwd)
  out=$(realpath "$out")
  script="benchmarks/run.py host"
  if [ ! -f "$other/benchmarks/run.py" ]; then script=benchmarks/bench_host.py; fi  # until 2026-11-29
  for run in first second; do  # the first run of a checkout compiles
    bench "host-$run" 140 host --cases 1x8192 thd8192 1x4096 || failed=1
    (cd "$other" && PYTHONPATH=$other:$PYTHONPATH step "host-other-$run" 140 python3 $script \
      --out "$out/host-other-$run.jsonl" --cases 1x8192 thd8192 1x4096) || failed=1
  done
  ;;
repeats)
  compile compile 200 "16:32 16:16 16:64" bf16 cut states || failed=1
  bits
  ;;
sanitize)
  LINES_SHOWN=60 step sanitize 569 python3 benchmarks/sanitize.py --out "$out" --seconds 550 || failed=1
  ;;
parallel)
  beside compile compile 240 "16:32 8:16 4:8 2:4"
  beside compile compile-cut 240 "16:16 16:64" bf16 cut
  beside step compile-upstream 240 python3 benchmarks/compile_upstream.py 8
  finish
  for tokens in 1x32768 thd32768x4096 1x131072 thd32768x512; do
    ranks "$tokens" 80 parallel --set 'measured=["graph"]' --out "$out/$tokens.jsonl" --cases $tokens || failed=1
  done
  ranks exchange 60 exchange --out "$out/exchange.jsonl" || failed=1
  ;;
rows)
  beside compile compile 240 "16:32 8:16 4:8 2:4"
  beside compile compile-cut 240 "16:16 16:64" bf16 cut
  finish
  out=$(realpath "$out")
  for cases in "1x131072 thd131072x4096" "thd131072x512 thd131072~2048"; do
    for layout in zigzag zigzag_buffer contiguous; do
      ranks "${cases##* }-$layout" 60 parallel --repeats 10 --set layout=$layout \
        --layers headwise chunkwise auto --cases $cases --out "$out/rows.jsonl" || failed=1
    done
  done
  ranks host 60 parallel --set in_a_row=6 --cases 1x32768 --layers headwise chunkwise auto \
    --out "$out/host.jsonl" || failed=1
  if [ -n "${OTHER:-}" ]; then
    other=$(cd "$OTHER" && pwd)
    script="benchmarks/run.py parallel --set in_a_row=6 --cases 1x32768"
    if [ ! -f "$other/benchmarks/run.py" ]; then  # until 2026-11-29
      script="benchmarks/bench_context_parallel.py --in-a-row 6 --cases 32768"
    fi
    (cd "$other" && PYTHONPATH=$other:$PYTHONPATH SIGNAL=TERM step host-other 60 torchrun --standalone \
      --nproc-per-node 4 $script --layers headwise chunkwise auto --out "$out/host-other.jsonl") || failed=1
  fi
  ;;
laws)
  beside compile compile 240 "16:32 8:16 4:8 2:4"
  beside compile compile-cut 240 "16:16 16:64" bf16 cut
  finish
  beside laws laws 300 tests/gpu/test_parallel.py
  CUDA_VISIBLE_DEVICES=2,3 beside laws resume 300 tests/gpu/test_exact_resume.py
  beside laws exchange-laws 300 tests/gpu/test_exchange.py
  bits
  ;;
models)
  beside compile compile 240 "16:32 8:16 4:8 2:4"
  beside laws one-gpu 240 tests/gpu/test_one_gpu.py
  beside step compile-upstream 240 python3 benchmarks/compile_upstream.py 32  # what its model runs
  finish
  beside laws models 300 tests/gpu/test_models.py
  finish
  bench model 120 model || failed=1
  ;;
*)
  echo "no part '$part'; there are check, measure, shapes, grid, trees, decode, fp8, kda, gdn2, gdp, host, repeats, sanitize, parallel, rows, laws and models" >&2
  exit 2
  ;;
esac
exit $failed
