#!/usr/bin/env bash
# Rollout modes at equal reward: the same recipe and seeds in every mode, then one table and two plots.
#
#     benchmarks/modes.sh OUT                                     the built-in task on a CPU
#     RECIPE=countdown DEVICE=cuda POLICY=OUT/policy HEAD=OUT/head KV_TOKENS=300000 \
#         benchmarks/modes.sh OUT                                 SmolLM2 with a long tail on a GPU
#
# POLICY and HEAD come from `benchmarks/countdown.sh OUT warmup drafter`. Runs follow each other, since their
# times are compared; with TOGETHER=1 the seeds of a mode run at once, so that every mode shares the machine with
# as much. MODES="sync partial" takes some of them, $EXTRA are further overrides, and runs that are there are
# not made again.
set -eu
OUT=${1:?where to write}
PYTHON=${PYTHON:-python3}
RECIPE=${RECIPE:-default}
DEVICE=${DEVICE:-cpu}
STEPS=${STEPS:-25}
SEEDS=${SEEDS:-0 1 2}
MODES=${MODES:-sync sync-paced partial oversample oversample-carry async-1 async-2 async-1-paced}
HERE=$(cd "$(dirname "$0")" && pwd)
DRAFTERS="[eagle,history]"
mkdir -p "$OUT/runs"

keys() { # MODE: its overrides, one per line
  case $1 in
  sync*) echo rollout.mode=sync ;;
  partial*) printf '%s\n' rollout.mode=partial rollout.max_lag="${LAG:-1}" ;;
  oversample-carry) printf '%s\n' rollout.mode=oversample rollout.stragglers=carry ;;
  oversample*) echo rollout.mode=oversample ;;
  async-*) printf '%s\n' rollout.mode=async rollout.max_lag="$(echo "$1" | cut -d- -f2)" ;;
  *) echo "no such mode: $1" >&2 && exit 2 ;;
  esac
  case $1 in
  *-paced)
    echo "rollout.speculation.drafters=$DRAFTERS"
    echo "rollout.speculation.online.share=0" # as when its tables were made
    if [ -n "${HEAD:-}" ]; then echo "rollout.speculation.eagle_path=$HEAD"; fi
    ;;
  *) echo "rollout.speculation.drafters=[]" ;;
  esac
}

one() { # MODE SEED
  name=$1-seed$2
  if [ -e "$OUT/runs/$name" ]; then return; fi
  mapfile -t overrides < <(keys "$1")
  if [ -n "${POLICY:-}" ]; then overrides+=("policy.path=$POLICY"); fi
  if [ -n "${KV_TOKENS:-}" ]; then overrides+=("rollout.kv_tokens=$KV_TOKENS"); fi
  echo "== $name"
  # shellcheck disable=SC2086 # $EXTRA is a list of words
  $PYTHON -m paceline train "$RECIPE" run.device="$DEVICE" run.root="$OUT/runs" run.name="$name" \
    run.seed="$2" run.steps="$STEPS" eval.every="${EVAL_EVERY:-5}" "${overrides[@]}" ${EXTRA:-} \
    >"$OUT/$name.log" 2>&1 || { tail -5 "$OUT/$name.log"; return 1; }
}

failed=0
if [ -n "${TOGETHER:-}" ]; then
  for mode in $MODES; do
    runs=()
    for seed in $SEEDS; do
      one "$mode" "$seed" &
      runs+=($!)
    done
    for run in "${runs[@]}"; do wait "$run" || failed=1; done # the others go on, and no mode beside them
  done
else
  for seed in $SEEDS; do
    for mode in $MODES; do one "$mode" "$seed"; done
  done
fi
$PYTHON "$HERE/modes_table.py" "$OUT/runs" "$OUT"
exit "$failed"
