#!/usr/bin/env bash
# The NEON level of attention where no Arm machine is at hand: the attention tests, cross-compiled and run under emulation.
# Debian: apt-get install g++-aarch64-linux-gnu qemu-user googletest
set -euo pipefail
cd "$(dirname "$0")/.."

build=${1:-build/neon}
mkdir -p "$build"
cxx=(aarch64-linux-gnu-g++ -std=c++20 -O2 -ffp-contract=off -Wall -Wextra -DFMT_HEADER_ONLY -DCRUMB_VERSION='"neon"'
     -Iinclude -Isrc -Itests -I/usr/src/googletest/googletest/include -I/usr/src/googletest/googletest -idirafter /usr/include -idirafter /usr/include/eigen3
     -ffunction-sections -Wl,--gc-sections)  # the readers of artefacts stay out

objects=()
compile() { # source, further options
    local object=$build/$(tr '/' '_' <<<"${1#/}").o
    if [[ ! $object -nt $1 ]]; then "${cxx[@]}" "${@:2}" -c "$1" -o "$object"; fi
    objects+=("$object")
}

for source in src/base/error.cpp src/page/{format,gain8,map,rows}.cpp \
    src/recipe/{table,tables,hadamard,encode,decode,levels}.cpp src/calibrate/artefact.cpp \
    src/attention/{plan,reference}.cpp src/attention/cpu/{attend,isa,maps}.cpp; do
    compile "$source"
done
for source in src/recipe/lanes/*.cpp; do
    compile "$source" -O3 -fno-math-errno -DCRUMB_LEVEL=portable -DCRUMB_LEVEL_NAME='"portable"'
done
compile src/attention/cpu/portable.cpp -O3
compile src/attention/cpu/neon.cpp -O3 -march=armv8.2-a+dotprod
compile /usr/src/googletest/googletest/src/gtest-all.cc
compile /usr/src/googletest/googletest/src/gtest_main.cc

for test in attention_test attention_order_test attention_simd_test; do
    "${cxx[@]}" "tests/$test.cpp" "${objects[@]}" -o "$build/$test" -pthread
    qemu-aarch64 -L /usr/aarch64-linux-gnu "$build/$test" --gtest_brief=1
done
