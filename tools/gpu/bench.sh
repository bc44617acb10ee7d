#!/usr/bin/env bash
# Decode and encode on a GPU beside the best 16-bit kernels that PyTorch has, in one call; files go to a folder.
# Usage: tools/gpu/bench.sh OUT_FOLDER [--quick]
#   OUT/ours.jsonl, OUT/opponents.jsonl (if PyTorch with CUDA is there), OUT/table.md
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${1:?output folder}
shift
mkdir -p "$out"
folder=build-cuda/gpu
if [[ ! -x $folder/cuda_bench ]]; then
    make cuda
fi
export LD_LIBRARY_PATH=$PWD/$folder/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
"$folder/cuda_bench" "$@" >"$out/ours.jsonl"
if python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
    env -u LD_LIBRARY_PATH python3 tools/gpu/opponents.py "$@" >"$out/opponents.jsonl"
else
    echo "no PyTorch with CUDA: opponents were not run" >&2
    rm -f "$out/opponents.jsonl"
fi
python3 tools/gpu/table.py "$out" | tee "$out/table.md"
