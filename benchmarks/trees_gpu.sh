#!/usr/bin/env bash
# Trees beside chains on a GPU at an 8B model's cost, and whole rollouts under the pacer:
#
#     benchmarks/trees_gpu.sh OUT [PART ...]
#
#     parts: chains trees head fp8 paced real table
#
# Logs and JSON files go to OUT. Each part has a time limit in seconds ($LIMIT, default 450) and does not stop
# the others; what has ended well (OUT/NAME.ok) is not run again. `chains`, `trees`, `head` and `fp8` use policy
# and head on sums that `benchmarks/tables.sh OUT eagle` leaves in OUT; `real` takes those of the long-tailed
# workload from $COUNTDOWN, the folder of `benchmarks/countdown.sh COUNTDOWN warmup drafter`. $EXTRA are further
# overrides of `real`.
set -u
OUT=${1:?where to write}
shift
COUNTDOWN=${COUNTDOWN:-$OUT}
PYTHON=${PYTHON:-python3}
LIMIT=${LIMIT:-450}
ROOT=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$ROOT:$ROOT/src${PYTHONPATH:+:$PYTHONPATH} # where `python -m benchmarks.NAME` finds the probes
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
speculation() { # NAME TOKENS OVERRIDE...
  # shellcheck disable=SC2086
  part "$1" "$PYTHON" -m benchmarks.speculation chain-sum policy.path="$OUT/policy-8b" run.device=cuda $SUMS \
    rollout.speculation.eagle_path="$OUT/eagle-8b" "${@:3}" --batches 1,4,16,64 --tokens "$2" --rounds 2 \
    --repeats 1 --json "$OUT/$1.json"
}
chains() { speculation chains 3,7; }
trees() { speculation trees 3,5,7,11,15 rollout.speculation.shape=tree; }
head() { # the head's own layer in FP8, beside `chains` and `trees`
  speculation chains-head8 1,3,7 rollout.speculation.eagle_precision=fp8
  speculation trees-head8 3,7,15 rollout.speculation.shape=tree rollout.speculation.eagle_precision=fp8
}
fp8() { speculation trees-fp8 7,15 rollout.speculation.shape=tree rollout.precision=fp8; }
paced() { # a pacer that knows nothing, on lengths that nobody tuned for; then on those of the notes
  part paced-700 "$PYTHON" -m benchmarks.pacing --model qwen3-8b --requests 192 \
    --lengths lognormal:700,1.2,8,5000 --acceptance 0.62,0.5,0.4,0.3 --draft-megabytes 650 \
    --tokens 1,2,3,7 --rollouts 2 --json "$OUT/paced-700.json"
  part paced-512 "$PYTHON" -m benchmarks.pacing --model qwen3-8b --requests 256 \
    --lengths lognormal:512,1.0,16,4096 --acceptance 0.8,0.78,0.76,0.74,0.7 --draft-megabytes 650 \
    --tokens 1,2,3,7 --rollouts 2 --json "$OUT/paced-512.json"
}
real() { # whole rollouts with the recipe's own drafters, pacer and lengths
  [ -e "$COUNTDOWN/head-8b/config.json" ] || part wide "$PYTHON" "$ROOT/benchmarks/widen.py" "$COUNTDOWN/policy" \
    "$COUNTDOWN/policy-8b" --to 8b --head "$COUNTDOWN/head" "$COUNTDOWN/head-8b"
  for requests in ${REQUESTS:-64 256}; do
    for precision in ${PRECISIONS:-base fp8+kv}; do
      # shellcheck disable=SC2086
      part "real-$requests-${precision/+/-}" "$PYTHON" -m benchmarks.pacing countdown \
        policy.path="$COUNTDOWN/policy-8b" rollout.speculation.eagle_path="$COUNTDOWN/head-8b" \
        run.device=cuda rollout.kv_tokens="${KV_TOKENS:-300000}" rollout.precision="$precision" \
        rollout.speculation.shape="${SHAPE:-tree}" 'rollout.speculation.drafters=[history,eagle]' \
        rollout.speculation.tokens=15 ${EXTRA:-} --requests "$requests" --tokens "${FIXED:-3,7}" \
        --rollouts "${ROLLOUTS:-2}" --json "$OUT/real-$requests-${precision/+/-}.json"
    done
  done
}
table() { # accept length, ratio to own plain decoding and share of drafting, chains beside trees
  "$PYTHON" - "$OUT" <<'END'
import json
import pathlib
import sys

print(f"{'':<12}{'batch':>6}  {'strategy':<20}{'step ms':>9}{'draft':>7}{'accept':>8}{'ratio':>7}")
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
    for p in json.loads(path.read_text()).get("points", []):
        if "batch" not in p:  # of `paced` and `real`
            print(f"{path.stem:<12}{'':>6}  {p['name']:<20}{p['seconds']:>8.2f}s")
            continue
        print(
            f"{path.stem:<12}{p['batch']:>6}  {p['strategy']:<20}{p['step_ms']['median']:>9.2f}"
            f"{p['draft_share']:>7.0%}{p['accept_length']:>8.2f}{p['ratio']:>7.2f}"
        )
END
}
for step in "${@:-chains trees head fp8 paced real table}"; do
  for name in $step; do "$name"; done
done
