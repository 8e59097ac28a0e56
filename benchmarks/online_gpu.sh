#!/usr/bin/env bash
# A head that learns during the run, on one GPU: what it accepts by step, and what it costs.
#
#     benchmarks/online_gpu.sh OUT [PART ...]
#
#   policy           the long-tailed workload's policy (countdown), unless $COUNTDOWN names one
#   heads            an in-domain and a general head for each policy; head:TASK:START is one of them
#   TASK:START:SHARE one run of $STEPS steps: TASK countdown, sums; START own, general, fresh; SHARE of the time
#   compare          ways to learn side by side, each $LIMIT seconds at most: for every way in $ARMS
#                    (name:source:override of rollout.speculation.online), $TASKS, $STARTS, $SEEDS one run
#   identical        the same run with and without learning, deterministic: metrics and weights must be equal
#   cost             steps at an 8B model's cost (LoRA): what learning adds
#   byproduct        the head that a run left behind against one trained offline on as many tokens, in our
#                    engine and, where $VLLM_PYTHON has it, in vLLM (byproduct.sh)
#   table            a line for each run: accept length at its begin and end, times, verdicts
#
# Two ways at equal cost, Countdown and sums, from a general and a fresh head, eight runs side by side, twice:
#
#     git archive --prefix=before/ COMMIT src | tar x
#     EXAMPLES=16000 benchmarks/online_gpu.sh OUT policy head:countdown:general head:sums:general
#     for seed in 0 1; do SEEDS=$seed LIMIT=170 KV_TOKENS=250000 STEPS=30 ARMS="before:before/src:budget=0.0101
#         share:src:share=0.0101" benchmarks/online_gpu.sh OUT compare; done
#
# Logs, runs and heads go to OUT. Each part ends within $LIMIT seconds (default 460) and can be called again: a
# run goes on from its checkpoint, what is there is not made twice.
set -u
OUT=${1:?where to write}
shift
HERE=$(cd "$(dirname "$0")" && pwd)
PYTHON=${PYTHON:-python3}
SMOLLM=${SMOLLM:-models/smollm2-135m} # from `paceline models get smollm2-135m`
COUNTDOWN=${COUNTDOWN:-$OUT/countdown}
LIMIT=${LIMIT:-460}
STEPS=${STEPS:-30}
SUMS='task.train_problems=512 task.eval_problems=64 rollout.max_tokens=128'
SUMS="$SUMS "'task.options={"min_terms":2,"max_terms":4,"min_digits":1,"max_digits":2}'
mkdir -p "$OUT"

part() { # NAME COMMAND...: runs a part within its limit; its log is OUT/NAME.log
  name=${1//:/-}
  shift
  began=$(date +%s)
  if timeout -s TERM -k 30 "$LIMIT" "$@" >>"$OUT/$name.log" 2>&1; then verdict=ok; else verdict="FAILED ($?)"; fi
  echo "$name: $verdict, $(($(date +%s) - began)) s"
  tail -n 6 "$OUT/$name.log" | cut -c1-200 | sed 's/^/    /'
}
policy() {
  [ -e "$COUNTDOWN/config.json" ] && return
  part policy "$PYTHON" -m paceline sft countdown run.device=cuda policy.path="$SMOLLM" run.root="$OUT" \
    run.name=sft sft.demonstrations="${EXAMPLES:-40000}"
  cp -r "$OUT/sft/checkpoints/best" "$COUNTDOWN"
}
recipe() { # TASK: the recipe's name and overrides
  case $1 in
  countdown) echo "countdown policy.path=$COUNTDOWN rollout.prompts_per_step=${PROMPTS:-16} rollout.kv_tokens=${KV_TOKENS:-300000}" ;;
  sums) echo "chain-sum policy.path=$SMOLLM $SUMS" ;;
  *) echo "unknown task $1" >&2 && exit 2 ;;
  esac
}
train_head() { # NAME POLICY RECIPE OVERRIDE...
  name=$1 policy=$2 recipe=$3
  shift 3
  [ -e "$OUT/$name/config.json" ] || part "$name" "$PYTHON" -m paceline drafter train "$policy" run.device=cuda "$@" \
    rollout.max_running=512 --recipe "$recipe" --responses 3072 --draft-vocab 2048 --steps 400 --unroll 5 \
    --batch 64 --lr 1e-3 --out "$OUT/$name"
}
one_head() { # TASK:START; own: of the task itself; general: of what the policy writes for another task's prompts
  # shellcheck disable=SC2086
  case $1 in
  sums:own) train_head sums-own "$SMOLLM" chain-sum $SUMS ;;
  sums:general) train_head sums-general "$SMOLLM" countdown rollout.max_tokens=256 ;;
  countdown:own) train_head countdown-own "$COUNTDOWN" countdown rollout.kv_tokens=300000 ;;
  countdown:general) train_head countdown-general "$COUNTDOWN" chain-sum $SUMS ;;
  *) echo "unknown head $1" >&2 && exit 2 ;;
  esac
}
heads() {
  for task in sums countdown; do
    for start in own general; do one_head "$task:$start" & done
  done
  wait
}
train() { # NAME TASK OVERRIDE...: resumes where the last call ended
  name=$1 task=$2
  shift 2
  if [ -e "$OUT/runs/$name/checkpoints" ]; then set -- --resume "$OUT/runs/$name"; fi
  if [ "${1:-}" = --resume ]; then
    part "$name" "$PYTHON" -m paceline train "$@"
  else
    # shellcheck disable=SC2046
    part "$name" "$PYTHON" -m paceline train $(recipe "$task") run.device=cuda run.root="$OUT/runs" run.name="$name" \
      run.steps="$STEPS" eval.every=0 eval.problems=8 eval.max_tokens=16 checkpoint.every=15 checkpoint.keep=1 \
      report.closing_pairs=0 \
      "rollout.speculation.drafters=[eagle]" rollout.speculation.pacing=fixed rollout.speculation.tokens=5 "$@"
  fi
}
start_of() { # TASK START: the override that names the head
  if [ "$2" = fresh ]; then echo rollout.speculation.eagle_path=fresh; else
    echo "rollout.speculation.eagle_path=$OUT/$1-$2"
  fi
}
one() { # TASK:START:SHARE
  IFS=: read -r task start share <<<"$1"
  train "$task-$start-$share" "$task" "$(start_of "$task" "$start")" rollout.speculation.online.share="$share"
}
compare() {
  for arm in ${ARMS:-share:src:share=0.01}; do
    IFS=: read -r arm source override <<<"$arm"
    for task in ${TASKS:-countdown sums}; do
      for start in ${STARTS:-general fresh}; do
        for seed in ${SEEDS:-0 1}; do
          PYTHONPATH=$source train "$task-$start-$seed-$arm" "$task" "$(start_of "$task" "$start")" \
            run.seed="$seed" run.threads=1 checkpoint.every=1000 rollout.speculation.online."$override" >/dev/null &
        done
      done
    done
  done
  wait
  table
}
identical() {
  for share in 0 0.5; do
    STEPS=3 train "identical-$share" sums rollout.speculation.eagle_path="$OUT/sums-own" rollout.deterministic=true \
      learning.deterministic=true rollout.speculation.online.share="$share"
  done
  part identical-verdict "$PYTHON" "$HERE/online_table.py" identical "$OUT/runs/identical-0" "$OUT/runs/identical-0.5"
}
cost() { # at an 8B model's cost; the small learning rate keeps the function near the small model's
  [ -e "$OUT/countdown-own-8b/config.json" ] || part widen "$PYTHON" "$HERE/widen.py" "$COUNTDOWN" \
    "$OUT/countdown-8b" --to 8b --head "$OUT/countdown-own" "$OUT/countdown-own-8b"
  for share in ${SHARES:-0 0.01}; do
    STEPS=${COST_STEPS:-6} train "cost-$share" countdown policy.path="$OUT/countdown-8b" policy.lora.rank=32 \
      learning.lr=1e-7 rollout.prompts_per_step=8 checkpoint.every=1000 \
      rollout.speculation.eagle_path="$OUT/countdown-own-8b" rollout.speculation.online.share="$share"
  done
}
byproduct() {
  # shellcheck disable=SC2086
  START=$OUT/sums-general ENGINE='{"gpu_memory_utilization":0.1}' part byproduct "$HERE/byproduct.sh" \
    "$OUT/byproduct" "$OUT/runs/sums-general-0.05" chain-sum $SUMS run.device=cuda
}
table() { "$PYTHON" "$HERE/online_table.py" runs "$OUT/runs"; }

for stage in "${@:-policy heads compare identical cost byproduct table}"; do
  for name in $stage; do
    case $name in head:*) one_head "${name#head:}" ;; *:*) one "$name" ;; *) $name ;; esac
  done
done
