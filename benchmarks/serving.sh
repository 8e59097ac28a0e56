#!/usr/bin/env bash
# `paceline serve` beside `vllm serve` on one GPU, asked by vLLM's own client: tokens/s and times to first token.
#
#     VLLM=/opt/vllm/bin POLICY=FOLDER benchmarks/serving.sh OUT [paceline] [vllm] [paced] [eagle]
#
# VLLM is the folder of vLLM's commands (0.26 or later); POLICY a Hugging Face folder with a tokenizer, such as
# one that `benchmarks/widen.py` wrote at 8B cost. `paceline` and `vllm` are without speculation; `paced` is
# native trees with the head HEAD, `eagle` vLLM's eagle3 with the same head at each number of proposals in $KS.
# $CLIENTS are how many ask at once; each asks for $ROUNDS responses of $TOKENS tokens after prompts of $PROMPT.
# Results that are there are not made again; the table has one line for each.
set -eu
OUT=${1:?where to write}
shift
PARTS=${*:-paceline vllm}
PYTHON=${PYTHON:-python3}
VLLM=${VLLM:?the folder of the commands of vLLM}
POLICY=${POLICY:?a policy with a tokenizer}
HEAD=${HEAD:-}
KS=${KS:-3 5 7}
CLIENTS=${CLIENTS:-1 16 64 256}
ROUNDS=${ROUNDS:-4}
PROMPT=${PROMPT:-128}
TOKENS=${TOKENS:-256}
PORT=${PORT:-8123}
EXTRA=${EXTRA:-}
mkdir -p "$OUT"

measure() { # NAME COMMAND...: starts a server, asks it, ends it
  name=$1
  shift
  "$@" >"$OUT/$name.log" 2>&1 &
  server=$!
  for _ in $(seq 600); do
    if curl -sf "http://127.0.0.1:$PORT/health" >/dev/null; then break; fi
    if ! kill -0 $server 2>/dev/null; then echo "$name: did not start" && tail -n 12 "$OUT/$name.log" && return; fi
    sleep 1
  done
  for clients in $CLIENTS; do
    result=$name-$clients.json
    if [ -e "$OUT/$result" ]; then continue; fi
    # The first round warms graphs and prefixes up, and is not counted.
    for kept in no yes; do
      "$VLLM/vllm" bench serve --backend openai --base-url "http://127.0.0.1:$PORT" --endpoint /v1/completions \
        --model served --tokenizer "$POLICY" --dataset-name random --random-input-len "$PROMPT" \
        --random-output-len "$TOKENS" --ignore-eos --temperature 1 --num-prompts $((clients * ROUNDS)) \
        --max-concurrency "$clients" --seed "$clients$([ $kept = yes ] && echo 1)" \
        --save-result --result-dir "$OUT" --result-filename "$([ $kept = yes ] && echo "$result" || echo warm.json)" \
        >>"$OUT/$name.log" 2>&1 || { echo "$name-$clients: failed" && tail -n 12 "$OUT/$name.log"; }
    done
  done
  kill -TERM $server
  wait $server 2>/dev/null || true
}
native() { # NAME OVERRIDE...
  # shellcheck disable=SC2086 # $EXTRA is a list of words
  measure "$1" $PYTHON -m paceline serve "$POLICY" --name served --port "$PORT" "${@:2}" $EXTRA
}
vllm() { # NAME OPTION...
  measure "$1" "$VLLM/vllm" serve "$POLICY" --served-model-name served --port "$PORT" --max-num-seqs 256 "${@:2}"
}

for part in $PARTS; do
  case $part in
  paceline) native paceline "rollout.speculation.drafters=[]" ;;
  vllm) vllm vllm ;;
  paced)
    native paced rollout.speculation.eagle_path="${HEAD:?the folder of the eagle head}" \
      "rollout.speculation.drafters=[history,eagle]" rollout.speculation.tokens=15 \
      rollout.speculation.shape=tree
    ;;
  eagle)
    for k in $KS; do
      vllm "eagle$k" --speculative-config \
        "{\"method\": \"eagle3\", \"model\": \"${HEAD:?the folder of the eagle head}\", \"num_speculative_tokens\": $k}"
    done
    ;;
  *) echo "no such part: $part (paceline, vllm, paced, eagle)" >&2 && exit 2 ;;
  esac
done
$PYTHON - "$OUT" <<'TABLE'
import json, sys
from pathlib import Path

print(f"{'server':<12}{'clients':>8}{'tok/s':>10}{'first token ms, median':>24}{'99%':>9}{'ms/token, median':>18}")
for path in sorted(Path(sys.argv[1]).glob("*-*.json"), key=lambda p: (p.stem.rsplit("-", 1)[0], int(p.stem.rsplit("-", 1)[1]))):
    name, clients = path.stem.rsplit("-", 1)
    told = json.loads(path.read_text())
    print(
        f"{name:<12}{clients:>8}{told['output_throughput']:>10,.0f}{told['median_ttft_ms']:>24.1f}"
        f"{told['p99_ttft_ms']:>9.1f}{told['median_tpot_ms']:>18.2f}"
    )
TABLE
