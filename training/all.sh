#!/usr/bin/env bash
# Every stage on one machine: `training/all.sh OUT [--steps 2 --batch 2 ...]`; what follows OUT goes to every stage.
# A stage puts its examples together and compiles while the one that it begins with still learns. The first that fails
# ends all. FROM is the checkpoint that it begins with, the demo's own; `FROM=` begins with nothing. Minutes of each: VIDEO and AUDIO
# (0 with a FROM: they stay as they are), DECODER, TEXT, REFERENCE, TURBO. For a try: POOL, CLIPS and EXAMPLES.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$1
shift
given=("$@") pool=(${POOL:+--pool "$POOL"}) from=${FROM-shared_runtime/demo/checkpoint} python=${PYTHON:-python}
export PYTHONPATH=${PYTHONPATH:-.} PYTHONUNBUFFERED=1
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

stage() {
  local name=$1 && shift
  # In place of the shell, which is what is waited for and killed.
  exec "$python" -m "training.$name" --out "$out" "$@" "${given[@]}"
}

finished() { for _ in $(jobs -p); do wait -n; done; }

vaes=$([ -z "$from" ] && echo 6 || echo 0)
stage video_vae --minutes "${VIDEO:-$vaes}" ${from:+--start-from "$from/vae"} &
stage audio_vae --minutes "${AUDIO:-$vaes}" ${from:+--start-from "$from/audio_vae"} "${pool[@]}" &
finished
[ "${DECODER:-0}" = 0 ] || (stage video_decoder --minutes "$DECODER" --start-from "$out/checkpoint/vae" "${pool[@]}")
(stage world --clips "${CLIPS:-8192}")
examples=(${EXAMPLES:+--examples "$EXAMPLES"})
text=$out/checkpoint/transformer
# What is waited for is this run's.
rm -f "$out"/checkpoint/transformer{,_ref}/*.safetensors
stage dit --partition transformer --minutes "${TEXT:-7}" ${from:+--start-from "$from/transformer"} "${examples[@]}" &
stage dit --partition transformer_ref --minutes "${REFERENCE:-7}" --start-from "$text" --wait "${examples[@]}" &
stage turbo --partition transformer --minutes "${TURBO:-3}" --wait "${examples[@]}" &
stage turbo --partition transformer_ref --minutes "${TURBO:-3}" --wait "${examples[@]}" &
finished
