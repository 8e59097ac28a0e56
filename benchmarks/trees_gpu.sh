#!/usr/bin/env bash
# Trees on a GPU: bits first, then what they gain over chains at an 8B model's cost.
#
#     benchmarks/trees_gpu.sh OUT [PART ...]
#
#     parts: kernels bits certify eagle chains trees head paced real fp8 table
#
# Logs and JSON files go to OUT. Each part has a time limit in seconds ($LIMIT, default 450) and does not stop
# the others; what has ended well (OUT/NAME.ok) is not run again. `chains` and those after it use the head in
# $EAGLE, or the one that `eagle` trains, on sums; `real` uses the long-tailed workload where $COUNTDOWN names a
# folder with the policy and the head of `benchmarks/countdown.sh`. $EXTRA are further overrides of `real`.
set -u
OUT=${1:?where to write}
shift
HERE=$(cd "$(dirname "$0")" && pwd)
PYTHON=${PYTHON:-python3}
SMOLLM=${SMOLLM:-models/smollm2-135m} # from `paceline models get smollm2-135m`
EAGLE=${EAGLE:-$OUT/eagle}
LIMIT=${LIMIT:-450}
SUMS='task.train_problems=512 task.eval_problems=64 rollout.max_tokens=128'
SUMS="$SUMS "'task.options={"min_terms":2,"max_terms":4,"min_digits":1,"max_digits":2}'
mkdir -p "$OUT"

part() { # NAME COMMAND...: runs a part within its limit; its log is OUT/NAME.log
  name=$1
  shift
  if [ -e "$OUT/$name.ok" ]; then echo "$name: done before"; return; fi
  began=$(date +%s)
  if timeout "$LIMIT" "$@" >"$OUT/$name.log" 2>&1; then verdict=ok; else verdict="FAILED ($?)"; fi
  if [ "$verdict" = ok ]; then : >"$OUT/$name.ok"; fi
  echo "$name: $verdict, $(($(date +%s) - began)) s"
  tail -n 12 "$OUT/$name.log" | sed 's/^/    /'
}
kernels() { # the bits of each path, and kernels against their references
  part kernels "$PYTHON" -m pytest -q -x -m gpu tests/kernels/test_tree_attention.py \
    tests/kernels/test_tree_step.py tests/kernels/test_candidates.py tests/kernels/test_history_index.py \
    tests/kernels/test_row_step.py tests/kernels/test_eagle_step.py
}
bits() { # whole rollouts in deterministic mode, and that they are chains' and plain decoding's
  part bits "$PYTHON" -m pytest -q -x -m gpu tests/drafting/test_trees_gpu.py
}
certify() {
  for how in "" "rollout.precision=fp8+kv" "--pacing adaptive"; do
    # shellcheck disable=SC2086
    part "certify-${how//[^a-z0-9]/}" "$PYTHON" -m paceline certify builtin --drafter eagle run.device=cuda \
      rollout.speculation.shape=tree --deterministic --quick $how
  done
}
eagle() {
  # shellcheck disable=SC2086
  part eagle "$PYTHON" -m paceline drafter train "$SMOLLM" run.device=cuda $SUMS --recipe chain-sum \
    --responses 6144 --draft-vocab 8192 --steps 1500 --unroll 5 --batch 64 --lr 1e-3 --out "$OUT/eagle"
}
widen() { # POLICY HEAD NAME: both at an 8B model's cost, once
  [ -e "$OUT/$3-head-8b/config.json" ] || part "$3-8b" "$PYTHON" "$HERE/widen.py" "$1" "$OUT/$3-8b" --to 8b \
    --head "$2" "$OUT/$3-head-8b"
}
speculation() { # NAME TOKENS OVERRIDE...
  widen "$SMOLLM" "$EAGLE" sums
  name=$1 tokens=$2
  shift 2
  # shellcheck disable=SC2086
  part "$name" "$PYTHON" -m paceline bench speculation chain-sum policy.path="$OUT/sums-8b" run.device=cuda \
    $SUMS rollout.speculation.eagle_path="$OUT/sums-head-8b" "$@" --batches 1,4,16,64 --tokens "$tokens" \
    --rounds 2 --repeats 1 --json "$OUT/$name.json"
}
chains() { speculation chains 3,7; }
trees() { speculation trees 3,5,7,11,15 rollout.speculation.shape=tree; }
paced() { # a pacer that knows nothing, on lengths that nobody tuned for; then on those of the docs
  part paced-700 "$PYTHON" -m paceline bench pacing --model qwen3-8b --requests 192 \
    --lengths lognormal:700,1.2,8,5000 --acceptance 0.62,0.5,0.4,0.3 --draft-megabytes 650 \
    --tokens 1,2,3,7 --rollouts 2 --json "$OUT/paced-700.json"
  part paced-512 "$PYTHON" -m paceline bench pacing --model qwen3-8b --requests 256 \
    --lengths lognormal:512,1.0,16,4096 --acceptance 0.8,0.78,0.76,0.74,0.7 --draft-megabytes 650 \
    --tokens 1,2,3,7 --rollouts 2 \
    --json "$OUT/paced-512.json"
}
real() { # whole rollouts with the recipe's own drafters, pacer and lengths, plainly and in trees
  if [ -n "${COUNTDOWN:-}" ]; then
    widen "$COUNTDOWN/policy" "$COUNTDOWN/head" countdown
    workload="countdown rollout.kv_tokens=${KV_TOKENS:-300000} policy.path=$OUT/countdown-8b"
    workload="$workload rollout.speculation.eagle_path=$OUT/countdown-head-8b"
  else
    widen "$SMOLLM" "$EAGLE" sums
    workload="chain-sum policy.path=$OUT/sums-8b rollout.speculation.eagle_path=$OUT/sums-head-8b $SUMS"
  fi
  for requests in ${REQUESTS:-64 256}; do
    for precision in ${PRECISIONS:-base fp8+kv}; do
      # shellcheck disable=SC2086
      part "real-$requests-${precision/+/-}" "$PYTHON" -m paceline bench pacing $workload \
        run.device=cuda rollout.precision="$precision" rollout.speculation.shape="${SHAPE:-tree}" \
        'rollout.speculation.drafters=[history,eagle]' rollout.speculation.tokens=15 ${EXTRA:-} \
        --requests "$requests" --tokens "${FIXED:-3,7}" --rollouts 2 \
        --json "$OUT/real-$requests-${precision/+/-}.json"
    done
  done
}
head() { # the head's own layer in FP8, beside `chains` and `trees`
  speculation chains-head8 1,3,7 rollout.speculation.eagle_precision=fp8
  speculation trees-head8 3,7,15 rollout.speculation.shape=tree rollout.speculation.eagle_precision=fp8
}
fp8() { speculation trees-fp8 7,15 rollout.speculation.shape=tree rollout.precision=fp8; }
table() { # accept length, ratio to own plain decoding and share of drafting, chains beside trees
  "$PYTHON" - "$OUT" <<'END'
import json
import pathlib
import sys

print(f"{'':<12}{'batch':>6}  {'strategy':<20}{'step ms':>9}{'draft':>7}{'accept':>8}{'ratio':>7}")
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
    for p in json.loads(path.read_text()).get("points", []):
        if "batch" not in p:  # of `paced`
            print(f"{path.stem:<12}{'':>6}  {p['name']:<20}{p['seconds']:>8.2f}s")
            continue
        print(
            f"{path.stem:<12}{p['batch']:>6}  {p['strategy']:<20}{p['step_ms']['median']:>9.2f}"
            f"{p['draft_share']:>7.0%}{p['accept_length']:>8.2f}{p['ratio']:>7.2f}"
        )
END
}
for step in "${@:-kernels bits certify eagle chains trees head paced real fp8 table}"; do
  for name in $step; do "$name"; done
done
