#!/usr/bin/env bash
# Updates of the learner on one GPU by shape and setting, then transformers with Liger on the same workload:
#
#     benchmarks/learner_gpu.sh OUT [4b 4b-free 4b-fp8 4b-host 1.7b 1.7b-exact 8b-lora 8b-lora-fp8 8b-8bit peer]
#
# JSON files go to OUT, with the kernels that took most of an update.
set -u
OUT=${1:?where to write}
shift
HERE=$(cd "$(dirname "$0")" && pwd)
PYTHON=${PYTHON:-python3}
export PYTHONPATH=$HERE/../src${PYTHONPATH:+:$PYTHONPATH} PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
mkdir -p "$OUT"

update() { # NAME MODEL OVERRIDE...
  echo "== $1"
  timeout 160 "$PYTHON" -m paceline bench learn --model "$2" --repeats 2 --json "$OUT/$1.json" "${@:3}"
}
for name in "${@:-4b 4b-fp8 1.7b 1.7b-exact peer}"; do
  for one in $name; do
    case $one in
    4b) update "$one" qwen3-4b ;;
    4b-free) update "$one" qwen3-4b learning.deterministic=false ;;
    4b-fp8) update "$one" qwen3-4b rollout.precision=fp8 ;;
    4b-host) update "$one" qwen3-4b learning.optimiser_state=host ;;
    1.7b) update "$one" qwen3-1.7b ;;
    1.7b-exact) update "$one" qwen3-1.7b learning.numerics=exact rollout.deterministic=true ;;
    8b-lora) update "$one" qwen3-8b policy.lora.rank=32 ;;
    8b-lora-fp8) update "$one" qwen3-8b policy.lora.rank=32 rollout.precision=fp8 ;;
    8b-8bit) update "$one" qwen3-8b learning.optimiser_state=8bit ;;
    peer) timeout 75 "$PYTHON" "$HERE/peer_learner.py" --shape qwen3-4b ;;
    *) echo "no such update: $one" >&2 && exit 2 ;;
    esac
  done
done
