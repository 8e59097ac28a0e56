#!/usr/bin/env bash
# What the engine's open questions need from a GPU, in parts of under eight minutes each:
#
#     benchmarks/engine_gpu.sh OUT prefill ratios experts
#
# JSON files and logs go to OUT; $PYTHON is the interpreter (default python3). Measure vLLM beside it
# (benchmarks/peer_vllm.py) on the same machine.
set -u
OUT=${1:?where to write}
shift
P="${PYTHON:-python3} -m paceline"
began=$(date +%s)

prefill() { # prompts of 28,000 tokens, with the flat kernel and without
  for mode in "" --deterministic; do
    # shellcheck disable=SC2086
    $P bench rollout --model qwen3-8b --requests 6 --prompt 28000 --lengths fixed:64 --kv-tokens 180000 \
      --repeats 2 $mode --json "$OUT/prefill${mode#-}.json"
  done
}
ratios() { # 7 and 4 query heads a kv head, with 4 and 8 kv heads
  for model in qwen2.5-7b llama-3.1-8b qwen3-4b; do
    $P bench decode --model "$model" --batches 1,16,24,32,40,64,96,128,160,256 --repeats 2 \
      --json "$OUT/ratios-$model.json"
  done
}
experts() {
  for precision in base fp8; do
    $P bench decode --model qwen3-30b-a3b --precision $precision --batches 1,16,64,128,256 --repeats 2 \
      --json "$OUT/experts-$precision.json"
  done
}
mkdir -p "$OUT"
for part in "$@"; do
  echo "== $part at $(($(date +%s) - began)) s"
  $part 2>&1 | tee "$OUT/$part.log"
done
echo "== done at $(($(date +%s) - began)) s"
