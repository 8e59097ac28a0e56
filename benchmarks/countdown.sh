#!/usr/bin/env bash
# The long-tailed workload on one GPU, from a pretrained model to the tables of benchmarks/notes/steps.md:
#
#     benchmarks/countdown.sh OUT warmup before drafter rl after steps steps_4b steps_8b
#
# Every stage leaves its result in OUT, so they can run one by one. RL runs of all seeds run side by side:
# what they show is learning, not speed.
set -u
OUT=${1:?where to write}
shift
SMOLLM=${SMOLLM:-models/smollm2-135m} # from `paceline models get smollm2-135m`
HERE=$(cd "$(dirname "$0")" && pwd)
PYTHON=${PYTHON:-python3}
P="$PYTHON -m paceline"
POLICY=$OUT/policy
HEAD=$OUT/head
RECIPE=${RECIPE:-countdown}
DEVICE=${DEVICE:-cuda}
STEPS=${STEPS:-16}
SEEDS=${SEEDS:-0 1 2}
mkdir -p "$OUT"
began=$(date +%s)

warmup() {
  $P sft "$RECIPE" run.device="$DEVICE" policy.path="$SMOLLM" sft.demonstrations="${EXAMPLES:-40000}" \
    run.root="$OUT/sft" run.name="warm-$began" &&
    cp -r "$OUT/sft/warm-$began/checkpoints/best" "$POLICY"
  $P eval "$POLICY" run.device="$DEVICE" eval.samples=2 rollout.max_running=512 --recipe "$RECIPE"
}
lengths() { # NAME POLICY
  rm -f "$OUT/lengths-$1"/step_*.jsonl # of an earlier run of this script
  $P rollout "$RECIPE" run.device="$DEVICE" policy.path="$2" --steps 4 --save "$OUT/lengths-$1"
  $PYTHON "$HERE/lengths.py" "$OUT/lengths-$1"
}
before() { lengths before "$POLICY"; }
after() { for seed in $SEEDS; do lengths "after-$seed" "$OUT/runs/plain-$seed/checkpoints/best"; done; }
drafter() {
  $P drafter train "$POLICY" run.device="$DEVICE" rollout.prompts_per_step=128 rollout.max_running=1024 rollout.kv_tokens=900000 \
    --recipe "$RECIPE" --responses "${RESPONSES:-4096}" --draft-vocab "${DRAFT_VOCAB:-1024}" --steps "${HEAD_STEPS:-400}" \
    --unroll 5 --batch 64 --lr 1e-3 --out "$HEAD"
  $P drafter eval "$POLICY" "$HEAD" run.device="$DEVICE" --recipe "$RECIPE" --k 7 --problems 64
}
rl_run() { # NAME SEED OVERRIDE...
  name=$1 seed=$2
  shift 2
  $P train "$RECIPE" run.device="$DEVICE" run.root="$OUT/runs" run.name="$name-$seed" run.seed="$seed" \
    policy.path="$POLICY" policy.activation_checkpointing=true rollout.deterministic=true \
    rollout.prompts_per_step="${PROMPTS:-16}" rollout.kv_tokens=300000 run.steps="$STEPS" \
    eval.every=0 eval.samples=2 "$@" >"$OUT/$name-$seed.log" 2>&1
}
paced_run() { # SEED
  rl_run paced "$1" "rollout.speculation.drafters=[eagle,history]" rollout.speculation.eagle_path="$HEAD" \
    rollout.speculation.online.share=0 # as when its tables were made
}
side_by_side() { # FUNCTION ARGUMENT...: for every seed at once
  for seed in $SEEDS; do "$@" "$seed" & done
  wait
}
plain() { side_by_side rl_run plain; }
paced() { side_by_side paced_run; }
rl() { # plain and paced runs with the same seeds
  plain
  paced
  $PYTHON "$HERE/same_learning.py" "$OUT/runs"
}
step_table() { # NAME POLICY HEAD OVERRIDE...: run it again for the cells that are missing
  name=$1 policy=$2 head=$3
  shift 3
  $P bench step "$RECIPE" run.device="$DEVICE" policy.path="$policy" \
    "rollout.speculation.drafters=[eagle]" rollout.speculation.eagle_path="$head" "$@" \
    --settings plain,history,eagle,paced,fp8+kv+paced --steps "${TIMED:-4}" --repeats "${REPEATS:-1}" \
    --budget "${BUDGET:-460}" --out "$OUT/$name" --json "$OUT/$name.json" --plot "$OUT/$name.svg"
}
steps() { step_table steps "$POLICY" "$HEAD"; }
# At a larger model's cost, with policy and head widened once. The small learning rate keeps the function near
# the small model's: updates reach the padding.
wide_steps() { # SHAPE OVERRIDE...
  shape=$1
  shift
  [ -e "$HEAD-$shape/config.json" ] ||
    $PYTHON "$HERE/widen.py" "$POLICY" "$POLICY-$shape" --to "$shape" --head "$HEAD" "$HEAD-$shape"
  step_table "steps-$shape" "$POLICY-$shape" "$HEAD-$shape" learning.lr=1e-7 rollout.prompts_per_step=8 "$@"
}
steps_4b() { wide_steps 4b; }
steps_8b() { wide_steps 8b policy.lora.rank=32; }

for stage in "$@"; do
  echo "== $stage at $(($(date +%s) - began)) s"
  $stage 2>&1 | tee "$OUT/$stage.log"
done
echo "== done at $(($(date +%s) - began)) s"
