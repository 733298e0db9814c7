#!/usr/bin/env bash
# Both engines over both heads, K and concurrency, on one GPU: all servers are started together, idle but for the one
# that is asked, and `peagle bench` goes through them. This is how docs/h200-smollm2 was made.
#
# usage: benchmarks/sweep_servers.sh TARGET P_EAGLE_HEAD EAGLE3_HEAD PROMPTS_DIR OUTPUT
#   TARGET: a folder, as vLLM reads it; PROMPTS_DIR: mt_bench.jsonl and HumanEval.jsonl.gz; OUTPUT: servers' logs and
#   results.jsonl, which `peagle bench --report-only --output OUTPUT` draws. Run it again to go on: it is kept.
#   PEAGLE, VLLM: commands (default: python3 -m peagle, vllm)
#   KS: values of K (default: 3 5 7); CONCURRENCY: numbers of users (default: 1 to 64)
#   STAGES: ENGINE:REPEATS[:CONCURRENCY] in order, ENGINE being ours, stock-vllm or all; a later one adds to those before
#     it (default: all:2)
#   BENCH_FLAGS: more of `peagle bench`
set -euo pipefail
target=$1 p_eagle=$2 eagle3=$3 prompts=$4 output=$5
peagle=${PEAGLE:-python3 -m peagle} vllm=${VLLM:-vllm}
users=${CONCURRENCY:-1,2,4,8,16,32,64} stages=${STAGES:-all:2}
mkdir -p "$output"
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT

speculation() { # METHOD K
  local head=$eagle3 parallel=
  [ "$1" = p-eagle ] && head=$p_eagle parallel=',"parallel_drafting":true'
  echo "{\"method\":\"eagle3\",\"model\":\"$head\",\"num_speculative_tokens\":$2$parallel}"
}
started=() # labels of the report, each with its server's command line
label() { # ENGINE METHOD K
  case $2 in
    none) echo "no speculation in $1" ;;
    eagle3) echo "EAGLE-3 K=$3 in $1" ;;
    p-eagle) echo "P-EAGLE K=$3 in $1" ;;
  esac
}
start() { # ENGINE METHOD K PORT COMMAND..
  local name=$1-$2-$3 label port=$4
  label=$(label "$1" "$2" "$3")
  shift 4
  set -- "$@" --port "$port" --served-model-name target --dtype bfloat16 --max-model-len 2048 --max-num-seqs 64 \
    --stream-interval 20 --no-enable-prefix-caching
  "$@" >"$output/server-$name.log" 2>&1 &
  pids+=($!)
  started+=("$label" "$(python3 -c 'import shlex, sys; print(shlex.join(sys.argv[1:]))' "$@")")
}
endpoints=()
port=9000
both() { # METHOD K
  local flags=()
  [ "$1" = none ] || flags=(--speculative-config "$(speculation "$1" "$2")")
  # shellcheck disable=SC2086  # commands of several words
  start ours "$1" "$2" "$port" $peagle serve "$target" --num-kv-blocks 9000 "${flags[@]}"
  # shellcheck disable=SC2086
  start stock-vllm "$1" "$2" $((port + 1)) $vllm serve "$target" --kv-cache-memory-bytes 3500000000 \
    --gpu-memory-utilization 0.3 --async-scheduling "${flags[@]}"
  endpoints+=("http://localhost:$port,name=ours,method=$1,k=$2,model=target,api=completions")
  endpoints+=("http://localhost:$((port + 1)),name=stock-vllm,method=$1,k=$2,model=target,api=completions")
  port=$((port + 2))
}
both none 0
for k in ${KS-3 5 7}; do both p-eagle "$k"; done
for k in ${KS-3 5 7}; do both eagle3 "$k"; done
for ((p = 9000; p < port; p++)); do
  for _ in $(seq 300); do
    curl -sf -o /dev/null "localhost:$p/health" && break
    for pid in "${pids[@]}"; do
      kill -0 "$pid" 2>/dev/null || { echo "a server ended: $(tail -n 1 "$output"/server-*.log)" >&2; exit 1; }
    done
    sleep 1
  done
  curl -sf -o /dev/null "localhost:$p/health" || { echo "port $p: no server (see $output/server-*.log)" >&2; exit 1; }
done
python3 -c 'import json, sys; print(json.dumps(dict(zip(sys.argv[1::2], sys.argv[2::2])), indent=2))' "${started[@]}" \
  >"$output/commands.json"
bench() { # ENGINE REPEATS CONCURRENCY
  local asked=() one
  for one in "${endpoints[@]}"; do
    [[ $1 = all || $one = *,name=$1,* ]] && asked+=(--endpoint "$one")
  done
  [ "$1" != all ] || asked+=(--server-commands "$output/commands.json")
  # shellcheck disable=SC2086
  $peagle bench "$target" "${asked[@]}" --workload "mt_bench=$prompts/mt_bench.jsonl" \
    --workload "humaneval=$prompts/HumanEval.jsonl.gz" --prompts-per-user 2 --concurrency "$3" --repeats "$2" \
    --max-tokens 256 --max-model-len 2048 --dtype bfloat16 --output "$output" ${BENCH_FLAGS:-}
}
for stage in $stages; do
  IFS=: read -r engine repeats some <<<"$stage"
  bench "$engine" "$repeats" "${some:-$users}"
done
