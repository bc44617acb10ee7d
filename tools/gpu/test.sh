#!/usr/bin/env bash
# Everything that can be tested on a machine with a GPU, in one call: all formats of the build against double precision,
# the encoder's bytes, CUDA graphs, two runs bit for bit, then the short tests under compute-sanitizer.
# Usage: tools/gpu/test.sh [FOLDER]   FOLDER: what tools/gpu/pack.sh made, build-cuda/gpu by default
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=${1:-build-cuda/gpu}
if [[ ! -x $folder/cuda_device_test ]]; then
    make cuda || exit 1
fi
export LD_LIBRARY_PATH=$PWD/$folder/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
failed=0
step() {
    echo "== $*"
    timeout "$limit" "$@" || { echo "FAILED ($?): $*"; failed=1; }
}
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
limit=60 step "$folder/c_api_test"
limit=300 step "$folder/cuda_device_test" --gtest_brief=1
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)
if [[ -n $sanitizer ]]; then
    for tool in memcheck racecheck initcheck synccheck; do
        limit=300 step "$sanitizer" --tool "$tool" --error-exitcode 9 "$folder/cuda_device_test" \
            --gtest_brief=1 --gtest_filter='*Short*'
    done
else
    echo "compute-sanitizer is not here: memory and races were not checked"
fi
((failed)) && echo "tools/gpu/test.sh: FAILED" || echo "tools/gpu/test.sh: all passed"
exit "$failed"
