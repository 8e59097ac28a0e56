#!/usr/bin/env bash
# RL steps with vLLM's rollouts beside native ones on one GPU, stage by stage: 4B cost, full; 8B cost, LoRA.
#
#     VLLM=/opt/vllm/bin/python POLICY=OUT/policy benchmarks/vllm_steps.sh OUT [4b] [8b] [paced] [eagle] [certify]
#
# VLLM is the Python of an environment with a GPU build of vLLM (0.26 to 0.32); POLICY comes from
# `benchmarks/countdown.sh OUT warmup`. `paced` is 8B cost with native trees, `eagle` with vLLM's eagle3 at each
# number of proposals in $KS: the head of both, HEAD, comes from `benchmarks/countdown.sh OUT drafter`.
#
# Both backends get the same prompts and the same KV pool; learner and vLLM share the GPU, so vLLM sleeps while
# the policy learns. A run is ended when $STEPS steps are recorded, or after $LIMIT seconds: there is no
# evaluation worth the name, no checkpoint and no closing comparison. Runs that are there are not made again.
# $EXTRA are further overrides of every run; $ENGINE and $SPECULATIVE are options of vLLM, such as
# '{async_scheduling: false}' and '{draft_sample_method: probabilistic}'.
set -eu
OUT=${1:?where to write}
shift
PARTS=${*:-4b 8b certify}
PYTHON=${PYTHON:-python3}
VLLM=${VLLM:?the Python of the environment with vLLM}
POLICY=${POLICY:?the warmed-up policy}
RECIPE=${RECIPE:-countdown}
DEVICE=${DEVICE:-cuda}
HEAD=${HEAD:-}
KS=${KS:-1 3}
KV_TOKENS=${KV_TOKENS:-200000}
PROMPTS=${PROMPTS:-8}
STEPS=${STEPS:-4}
LIMIT=${LIMIT:-200}
SHAPE_4B=${SHAPE_4B-qwen3-4b} # empty: the policy as it is
SHAPE_8B=${SHAPE_8B-qwen3-8b}
ENGINE=${ENGINE:-}
SPECULATIVE=${SPECULATIVE:-}
EXTRA=${EXTRA:-}
HERE=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$OUT/runs"

recorded() { # NAME: prints how many steps a run has recorded
  cat "$OUT/runs/$1/metrics.jsonl" 2>/dev/null | grep -c '"kind": "train"' || true
}
run() { # NAME OVERRIDE...
  name=$1
  shift
  if [ -e "$OUT/runs/$name" ]; then echo "$name: done before"; return; fi
  began=$(date +%s)
  # One step more than is counted, so that what follows the last one is never begun. At 4B cost and more the
  # learning rate keeps the function near the small model's: updates reach the padding.
  # shellcheck disable=SC2086 # $EXTRA is a list of words
  $PYTHON -m paceline train "$RECIPE" run.device="$DEVICE" run.root="$OUT/runs" \
    run.name="$name" run.steps=$((STEPS + 1)) rollout.kv_tokens="$KV_TOKENS" rollout.prompts_per_step="$PROMPTS" \
    rollout.max_running=$((PROMPTS * 8)) learning.lr=1e-7 eval.every=0 eval.problems=8 eval.max_tokens=16 \
    report.closing_pairs=0 checkpoint.every=1000 "$@" $EXTRA >"$OUT/$name.log" 2>&1 &
  process=$!
  while kill -0 $process 2>/dev/null && [ $(($(date +%s) - began)) -lt "$LIMIT" ] &&
    [ "$(recorded "$name")" -lt "$STEPS" ]; do sleep 1; done
  kill -KILL $process 2>/dev/null || true
  wait $process 2>/dev/null || true
  steps=$(recorded "$name")
  echo "$name: ${steps:-0} of $STEPS steps, $(($(date +%s) - began)) s"
  if [ "${steps:-0}" -lt "$STEPS" ]; then tail -n 12 "$OUT/$name.log" | sed 's/^/    /'; fi
}
native() { run "$1-native" rollout.backend=native "${@:2}"; }
vllm() { # NAME OVERRIDE...
  run "$1-vllm" rollout.backend=vllm rollout.vllm.python="$VLLM" rollout.vllm.request_seeds=false \
    ${ENGINE:+"rollout.vllm.engine=$ENGINE"} "${@:2}"
}
plain() { # NAME OVERRIDE...: both without speculation
  native "$@" "rollout.speculation.drafters=[]"
  vllm "$@" "rollout.speculation.drafters=[]"
}
paced() { # native trees with a head, which does not learn
  # shellcheck disable=SC2086 # lists of words
  native spec-paced $(speculating) "rollout.speculation.drafters=[history,eagle]" rollout.speculation.tokens=15 \
    rollout.speculation.shape=tree rollout.speculation.pacing=adaptive
}
eagle() { # vLLM's eagle3 with the same head, exported
  for k in $KS; do
    # shellcheck disable=SC2046 # a list of words
    vllm "spec-eagle$k" $(speculating) "rollout.speculation.drafters=[eagle]" rollout.speculation.tokens="$k" \
      rollout.speculation.pacing=fixed rollout.speculation.verify=rejection \
      ${SPECULATIVE:+"rollout.vllm.speculative=$SPECULATIVE"}
  done
}
wide() { # SHAPE [--head HEAD HEAD_OUT]: prints where the policy at that cost is; empty: the policy as it is
  if [ -z "$1" ]; then echo "$POLICY"; return; fi
  if [ ! -e "$OUT/policy-$1/config.json" ] || { [ $# -gt 1 ] && [ ! -e "$4/config.json" ]; }; then
    $PYTHON "$HERE/widen.py" "$POLICY" "$OUT/policy-$1" --to "$1" "${@:2}" >&2
  fi
  echo "$OUT/policy-$1"
}
speculating() {
  head=${HEAD:?the folder of the eagle head}
  policy=$(wide "$SHAPE_8B" ${SHAPE_8B:+--head "$HEAD" "$OUT/head-$SHAPE_8B"})
  if [ -n "$SHAPE_8B" ]; then head=$OUT/head-$SHAPE_8B; fi
  echo "policy.path=$policy policy.lora.rank=32" \
    "rollout.speculation.eagle_path=$head rollout.speculation.online.share=0"
}
certify() {
  for drafter in none eagle ngram disturbed; do
    began=$(date +%s)
    if timeout "$LIMIT" $PYTHON -m paceline certify builtin --backend vllm --drafter $drafter \
      "rollout.vllm.python=$VLLM" rollout.kv_tokens=65536 --json "$OUT/certify-$drafter.json" \
      >"$OUT/certify-$drafter.log" 2>&1; then verdict=passed; else verdict="FAILED ($?)"; fi
    echo "certify-$drafter: $verdict, $(($(date +%s) - began)) s"
    tail -n 5 "$OUT/certify-$drafter.log" | sed 's/^/    /'
  done
}

for part in $PARTS; do
  # shellcheck disable=SC2086 # lists of words
  case $part in
  4b) plain 4b policy.path="$(wide "$SHAPE_4B")" ;;
  8b) plain 8b policy.path="$(wide "$SHAPE_8B")" policy.lora.rank=32 ;;
  paced) paced ;;
  eagle) eagle ;;
  certify) certify ;;
  *) echo "no such part: $part (4b, 8b, paced, eagle, certify)" >&2 && exit 2 ;;
  esac
done
$PYTHON "$HERE/vllm_table.py" "$OUT/runs"
