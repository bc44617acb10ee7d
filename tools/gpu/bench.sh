#!/usr/bin/env bash
# Decode and encode on a GPU beside other people's kernels, in one call; files go to a folder.
# Usage: tools/gpu/bench.sh OUT_FOLDER PROGRAMS [--quick] [--oscar FILE]
#   PROGRAMS: what tools/gpu/pack.sh made, build-cuda/gpu; FILE: see opponents.py
#   OUT/ours.jsonl, OUT/opponents.jsonl (if PyTorch with CUDA is there), OUT/bench.json, OUT/table.md, OUT/*.svg
set -euo pipefail
tools=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${1:?output folder}
folder=${2:?folder of the programs}
shift 2
mkdir -p "$out"
if [[ ! -x $folder/cuda_bench ]]; then
    make -C "$tools/../.." cuda
fi
quick=()
[[ " $* " == *" --quick "* ]] && quick=(--quick)
LD_LIBRARY_PATH=$folder/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} "$folder/cuda_bench" "${quick[@]}" >"$out/ours.jsonl"
if python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
    python3 "$tools/opponents.py" "$@" >"$out/opponents.jsonl"
else
    echo "no PyTorch with CUDA: opponents were not run" >&2
    rm -f "$out/opponents.jsonl"
fi
python3 "$tools/table.py" "$out" | tee "$out/table.md"
