#!/usr/bin/env bash
# Runs `vllm bench serve`, unchanged, against `peagle serve` and checks the JSON that it writes.
#
#   benchmarks/vllm_bench_serve.sh TARGET HEAD OUTPUT.json [further flags of vllm bench serve]
#
# VLLM_PYTHON: the Python that vLLM is installed in (default: python3). PEAGLE: the peagle command (default: peagle).
# BACKEND: vllm (default, /v1/completions) or openai-chat. K: drafts a step (default 5). PARALLEL: true for a P-EAGLE
# head (default), false for an EAGLE-3 head. The random prompts need no download: 8 prompts of 40 tokens, 24 tokens of
# answer each, 2 at a time. Times on a machine that does other things as well say nothing.
set -euo pipefail

target=$1 head=$2 output=$3
shift 3
k=${K:-5} backend=${BACKEND:-vllm}
here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
server=
touch "$scratch/server.log"
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; rm -rf "$scratch"' EXIT

${PEAGLE:-peagle} serve "$target" --port 0 --served-model-name target --max-model-len 2048 \
  --no-dynamic-speculation --speculative-config \
  "{\"method\": \"eagle3\", \"model\": \"$head\", \"num_speculative_tokens\": $k, \"parallel_drafting\": ${PARALLEL:-true}}" \
  > "$scratch/server.log" 2>&1 &
server=$!
for _ in $(seq 600); do
  url=$(sed -n 's/^listening *//p' "$scratch/server.log")
  [ -z "$url" ] || break
  kill -0 "$server" 2>/dev/null || { cat "$scratch/server.log" >&2; exit 1; }
  sleep 0.2
done

endpoint=/v1/completions
[ "$backend" != openai-chat ] || endpoint=/v1/chat/completions
# the function behind the command: vLLM's builds without package metadata have no `vllm` command
"${VLLM_PYTHON:-python3}" - --backend "$backend" --endpoint "$endpoint" --base-url "$url" --model target \
  --tokenizer "$target" --dataset-name random --random-input-len 40 --random-output-len 24 --num-prompts 8 \
  --max-concurrency 2 --temperature 0 --ignore-eos --save-result --save-detailed --result-filename "$output" "$@" <<'PYTHON'
import argparse

from vllm.benchmarks import serve

parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
PYTHON

curl -sf "$url/metrics" > "$scratch/metrics.txt"
python3 "$here/check_vllm_bench.py" "$output" "$scratch/metrics.txt"
kill -TERM "$server"
wait "$server"
