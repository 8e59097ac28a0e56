#!/usr/bin/env bash
# The head that a run leaves behind, beside one trained offline from the same start on as many tokens.
#
#     benchmarks/byproduct.sh OUT RUN RECIPE [OVERRIDE ...]
#
# RUN is a finished run of RECIPE with rollout.speculation.online.share above 0. Both heads draft for the policy
# that it ended with, along its responses to held-out problems: in `paceline drafter eval`, sampled and greedy,
# and in vLLM (`eagle3`, greedy) where $VLLM_PYTHON has it. START is the head that RUN began with (default: a fresh
# one), LR the rates of heads trained offline, BATCH the responses of one of their steps. Heads that are there are not
# trained again.
set -eu
OUT=${1:?where to write}
RUN=${2:?a run whose head learned}
RECIPE=${3:?its recipe}
shift 3
PYTHON=${PYTHON:-python3}
START=${START:-}
LR=${LR:-1e-3}
PROBLEMS=${PROBLEMS:-256}
BATCH=${BATCH:-16} # as passages in an update
HERE=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$OUT"

logged() { # NAME COMMAND...: its log is OUT/NAME.log
  log=$OUT/$1.log
  shift
  "$@" >"$log" 2>&1 || { tail -n 20 "$log" && exit 1; }
}
policy=$RUN/checkpoints/$(ls "$RUN/checkpoints" | grep '^step_' | tail -n 1)/policy
read -r tokens responses steps < <("$PYTHON" "$HERE/online_table.py" learned "$RUN" "$BATCH")
echo "the run's head: $tokens tokens, of $responses responses; offline: $steps steps of $BATCH responses"
heads=("$RUN/drafter")
for lr in $LR; do
  head=$OUT/offline-$lr-batch-$BATCH
  heads+=("$head")
  if [ ! -e "$head" ]; then # one that was stopped has fewer steps than it should
    logged "$(basename "$head")" "$PYTHON" -m paceline drafter train "$policy" "$@" --recipe "$RECIPE" \
      ${START:+--start "$START"} --responses "$responses" --batch "$BATCH" --unroll 5 --lr "$lr" --steps "$steps" \
      --out "$head-unfinished"
    mv "$head-unfinished" "$head"
  fi
done
for head in "${heads[@]}"; do
  name=$(basename "$head")
  for temperature in 1 0; do
    logged "eval-$name-$temperature" "$PYTHON" -m paceline drafter eval "$policy" "$head" "$@" --recipe "$RECIPE" \
      --k 5 --problems "$PROBLEMS" --temperature "$temperature"
    length=$(grep '^shared noise' "$OUT/eval-$name-$temperature.log")
    echo "$name, temperature $temperature: accept length ${length##* }"
  done
  [ -z "${VLLM_PYTHON:-}" ] || logged "vllm-$name" "$PYTHON" "$HERE/online_vllm.py" "$RECIPE" "$@" \
    policy.path="$policy" rollout.speculation.eagle_path="$head" rollout.speculation.tokens=5 \
    rollout.vllm.python="$VLLM_PYTHON" "rollout.vllm.engine=${ENGINE:-{\}}"
  [ -z "${VLLM_PYTHON:-}" ] || echo "$name, vLLM, greedy: $(tail -n 1 "$OUT/vllm-$name.log")"
done
