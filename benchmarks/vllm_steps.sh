#!/usr/bin/env bash
# RL steps with vLLM's rollouts beside native ones on one GPU, stage by stage: 4B cost, full; 8B cost, LoRA.
#
#     VLLM=/opt/vllm/bin/python POLICY=OUT/policy benchmarks/vllm_steps.sh OUT [4b] [8b] [certify]
#
# VLLM is the Python of an environment with a GPU build of vLLM (0.26 to 0.32); POLICY comes from
# `benchmarks/countdown.sh OUT warmup`. Both backends get the same KV pool; learner and vLLM share the GPU, so
# vLLM sleeps while the policy learns. Runs that are there are not made again.
set -eu
OUT=${1:?where to write}
shift
PARTS=${*:-4b 8b certify}
PYTHON=${PYTHON:-python3}
VLLM=${VLLM:?the Python of the environment with vLLM}
POLICY=${POLICY:?the warmed-up policy}
KV_TOKENS=${KV_TOKENS:-120000}
STEPS=${STEPS:-4}
HERE=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$OUT/runs"

steps() { # NAME OVERRIDES...: native and vLLM with the same overrides
  for backend in native vllm; do
    name=$1-$backend
    if [ -e "$OUT/runs/$name" ]; then continue; fi
    overrides=("rollout.backend=$backend" "rollout.speculation.drafters=[]" "rollout.kv_tokens=$KV_TOKENS")
    if [ "$backend" = vllm ]; then overrides+=("rollout.vllm.python=$VLLM" rollout.vllm.request_seeds=false); fi
    echo "== $name"
    $PYTHON -m paceline train countdown policy.path="$POLICY" run.device=cuda run.root="$OUT/runs" \
      run.name="$name" run.steps="$STEPS" "${overrides[@]}" "${@:2}" \
      >"$OUT/$name.log" 2>&1 || tail -5 "$OUT/$name.log"
  done
}

for part in $PARTS; do
  case $part in
  4b) steps 4b policy.widen=qwen3-4b ;;
  8b) steps 8b policy.widen=qwen3-8b policy.lora.rank=32 ;;
  certify)
    for drafter in none eagle ngram disturbed; do
      $PYTHON -m paceline certify builtin --backend vllm --drafter $drafter "rollout.vllm.python=$VLLM" \
        rollout.kv_tokens=65536 --json "$OUT/certify-$drafter.json" >"$OUT/certify-$drafter.log" 2>&1 ||
        tail -5 "$OUT/certify-$drafter.log"
    done
    ;;
  *) echo "no such part: $part (4b, 8b, certify)" >&2 && exit 2 ;;
  esac
done
$PYTHON "$HERE/vllm_table.py" "$OUT/runs"
