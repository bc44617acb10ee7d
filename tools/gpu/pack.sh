#!/usr/bin/env bash
# Collects what the tests and benchmarks need on a machine with a GPU driver and nothing else: the programs, and the shared
# libraries that are neither the C library's nor the driver's. The CUDA runtime is linked statically.
# Usage: tools/gpu/pack.sh BUILD_FOLDER   ->  BUILD_FOLDER/gpu
set -euo pipefail
build=${1:?build folder}
to=$build/gpu
rm -rf "$to"
mkdir -p "$to/lib"
for program in tests/cuda_device_test bench/cuda_bench tests/c_api_test; do
    cp "$build/$program" "$to/"
    ldd "$build/$program" | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' |
        { grep -vE '/(libc|libm|libdl|librt|libpthread|libcuda|ld-linux.*)\.so' || true; } | xargs -r cp -Lut "$to/lib"
done
strip --strip-unneeded "$to"/cuda_device_test "$to"/cuda_bench "$to"/c_api_test
du -sh "$to"
