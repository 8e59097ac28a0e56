#!/usr/bin/env bash
# The GPU tables of docs/benchmarks.md, one function each:
#
#     benchmarks/tables.sh OUT decode rollout long verify ...
#
# JSON files and logs go to OUT. Everything runs in this process's Python ($PYTHON, default python3);
# vLLM (benchmarks/peer_vllm.py) needs an environment of its own.
set -u
OUT=${1:?where to write}
shift
SMOLLM=${SMOLLM:-models/smollm2-135m} # from `paceline models get smollm2-135m`
P="${PYTHON:-python3} -m paceline"
SUMS='task.train_problems=512 task.eval_problems=64 rollout.max_tokens=128'
SUMS="$SUMS "'task.options={"min_terms":2,"max_terms":4,"min_digits":1,"max_digits":2}'
began=$(date +%s)

decode() {
  $P bench decode --model qwen3-8b --repeats 2 --precision "${1:-base}" --json "$OUT/decode-${1:-base}.json"
}
rollout() {
  $P bench rollout --model qwen3-8b --precision "${1:-base}" --json "$OUT/rollout-${1:-base}.json"
}
long() { # too little KV for 12 x 28,000 tokens
  $P bench rollout --model qwen3-8b --requests 12 --prompt 28000 --lengths lognormal:750,0.6,256,2000 \
    --kv-tokens 170000 --repeats 0 --json "$OUT/long.json"
}
verify() {
  $P bench decode --model qwen3-8b --batches 1,4,8,16,32,64,128 --proposals 0,1,3,5,7 --new 32 \
    --repeats 2 --json "$OUT/verify.json"
}
kernels() {
  $P bench kernels --model qwen3-8b --json "$OUT/kernels.json"
  $P bench kernels --model qwen3-30b-a3b --only experts,fp8-experts --json "$OUT/kernels-experts.json"
}
memory() { # what `paceline plan` promises beside what a GPU counts
  common="rollout.prompts_per_step=8 rollout.samples_per_prompt=8 rollout.max_running=64"
  common="$common rollout.max_tokens=96 eval.max_tokens=96 task.max_prompt_tokens=192"
  # shellcheck disable=SC2086
  {
    $P bench memory policy.path=qwen3-8b policy.activation_checkpointing=true $common
    $P bench memory policy.path=qwen3-8b policy.lora.rank=32 $common
    $P bench memory policy.path=qwen3-1.7b $common
    $P bench memory policy.path=qwen3-1.7b learning.kl_coef=0.01 learning.micro_batch_tokens=4096 $common
  }
}
eagle() { # trained on the small policy, measured with both widened to 8B cost
  # shellcheck disable=SC2086
  $P drafter train "$SMOLLM" run.device=cuda $SUMS --recipe chain-sum --responses 6144 --draft-vocab 8192 \
    --steps 1500 --unroll 5 --batch 64 --lr 1e-3 --out "$OUT/eagle" | tail -n 4
  # shellcheck disable=SC2086
  $P drafter eval "$SMOLLM" "$OUT/eagle" run.device=cuda $SUMS --recipe chain-sum --k 5 --problems 64
  # shellcheck disable=SC2086
  $P bench speculation chain-sum policy.path="$SMOLLM" policy.widen=8b run.device=cuda $SUMS \
    rollout.speculation.eagle_path="$OUT/eagle" --batches 1,4,16,64 --tokens 1,2,3,5,7 \
    --verify shared-noise,rejection --rounds 2 --repeats 2 --json "$OUT/speculation.json"
}
certify() { # both ways to verify, fast and deterministic mode, under the pacer, and the FP8 policy
  for mode in "--verify shared-noise" "--verify rejection" "--verify shared-noise --deterministic" \
    "--pacing adaptive --deterministic" "rollout.precision=fp8+kv --deterministic"; do
    # shellcheck disable=SC2086
    $P certify builtin --drafter eagle run.device=cuda --quick $mode
  done
}
pacing() {
  $P bench pacing --model qwen3-8b --draft-megabytes 650 --tokens 1,3,7 --rollouts 2 \
    --json "$OUT/pacing.json" --page "$OUT/pacing.html"
}
never_right() { # a drafter whose proposals are always wrong
  $P bench pacing --model qwen3-8b --draft-megabytes 650 --tokens 3 --rollouts 2 --acceptance 0 \
    --lengths lognormal:256,1.0,16,2048
}
fp8() { for p in base kv fp8 fp8+kv; do decode $p && rollout $p; done; }
kv_bound() { # responses of 8-9k tokens, 11 GB of cache: twice the tokens in FP8
  for p in base:75000 kv:150000 fp8:75000 fp8+kv:150000; do
    $P bench rollout --model qwen3-8b --precision ${p%:*} --requests 12 --prompt 512 \
      --lengths lognormal:8400,0.05,8000,10000 --kv-tokens ${p#*:} --repeats 0 \
      --json "$OUT/kv-bound-${p%:*}.json"
  done
}
experts() {
  for p in base fp8; do
    $P bench decode --model qwen3-30b-a3b --precision $p --repeats 2 --json "$OUT/experts-$p.json"
  done
}
for table in "$@"; do
  echo "== $table at $(($(date +%s) - began)) s"
  $table 2>&1 | tee "$OUT/$table.log"
done
echo "== done at $(($(date +%s) - began)) s"
