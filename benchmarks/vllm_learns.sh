#!/usr/bin/env bash
# Does a run with vLLM's rollouts end where one with native rollouts does? The same recipe, three seeds each.
#
#     benchmarks/vllm_learns.sh OUT           needs .venv-vllm (scripts/vllm_env.sh), or VLLM=its python
#
# Runs that are there are not made again. The table has held-out accuracy, with its interval, for each run.
set -eu
OUT=${1:?where to write}
PYTHON=${PYTHON:-python3}
RECIPE=${RECIPE:-default}
VLLM=${VLLM:-.venv-vllm/bin/python}
SEEDS=${SEEDS:-0 1 2}
STEPS=${STEPS:-25}
HERE=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$OUT/runs"

for seed in $SEEDS; do
  for backend in native vllm; do
    name=$backend-seed$seed
    if [ -e "$OUT/runs/$name" ]; then continue; fi
    overrides=("rollout.backend=$backend" "rollout.speculation.drafters=[]")
    if [ "$backend" = vllm ]; then overrides+=("rollout.vllm.python=$VLLM"); fi
    echo "== $name"
    $PYTHON -m paceline train "$RECIPE" run.root="$OUT/runs" run.name="$name" run.seed="$seed" \
      run.steps="$STEPS" "${overrides[@]}" >"$OUT/$name.log" 2>&1 || { tail -5 "$OUT/$name.log"; exit 1; }
  done
done
$PYTHON "$HERE/vllm_table.py" "$OUT/runs"
