#!/usr/bin/env bash
# Everything that can be tested on a machine with a GPU, in one call: all formats of the build against double precision,
# the encoder's bytes, CUDA graphs, two runs bit for bit, then short tests of two formats under compute-sanitizer. The references take
# the CPU's time, so tests run side by side, as many as there are cores.
# Usage: tools/gpu/test.sh [FOLDER]   FOLDER: what tools/gpu/pack.sh made, build-cuda/gpu by default
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
folder=${1:-build-cuda/gpu}
if [[ ! -x $folder/cuda_device_test ]]; then
    make cuda || exit 1
fi
folder=$(realpath "$folder")
export LD_LIBRARY_PATH=$folder/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
failed=0

# in_parts N COMMAND: the tests of a program in N processes; what fails is shown.
in_parts() {
    local n=$1 i pids=() status
    shift
    echo "== $*"
    for ((i = 0; i < n; i++)); do
        GTEST_TOTAL_SHARDS=$n GTEST_SHARD_INDEX=$i timeout 300 "$@" >"$logs/$i" 2>&1 &
        pids+=($!)
    done
    for ((i = 0; i < n; i++)); do
        status=0
        wait "${pids[i]}" || status=$?
        if ((status != 0)); then
            echo "FAILED ($status): part $i of $n: $*"
            tail -n 40 "$logs/$i"
            failed=1
        fi
    done
    grep -hoE '^\[  (PASSED|SKIPPED) +\] [0-9]+ tests?|ERROR SUMMARY.*|RACECHECK SUMMARY.*' "$logs"/* | sort | uniq -c
    rm -f "$logs"/*
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
"$folder/c_api_test" || failed=1
in_parts "$(nproc)" "$folder/cuda_device_test" --gtest_brief=1
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)
if [[ -n $sanitizer ]]; then
    some='*Short*/d128_k128_v128_gain8:*Short*/d64_k96_v64_*:DeviceEncode.*:DeviceGraph.*' # a minute a format and tool
    for tool in memcheck racecheck initcheck synccheck; do
        in_parts 6 "$sanitizer" --tool "$tool" --error-exitcode 9 "$folder/cuda_device_test" --gtest_brief=1 --gtest_filter="$some"
    done
else
    echo "compute-sanitizer is not here: memory and races were not checked"
fi
((failed)) && echo "tools/gpu/test.sh: FAILED" || echo "tools/gpu/test.sh: all passed"
exit "$failed"
