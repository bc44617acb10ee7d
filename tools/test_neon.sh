#!/usr/bin/env bash
# The NEON level where no Arm machine is at hand: cross-compiles the kernel, and the tests of its dot products and of its
# elementary functions, and runs those under emulation. Debian: g++-aarch64-linux-gnu qemu-user googletest
set -euo pipefail
cd "$(dirname "$0")/.."

build=${1:-build/neon}
googletest=/usr/src/googletest/googletest
mkdir -p "$build"
cxx=(aarch64-linux-gnu-g++ -std=c++20 -O2 -march=armv8.2-a+dotprod -ffp-contract=off -Wall -Wextra -Wno-unused-function
     -DFMT_HEADER_ONLY -Iinclude -Isrc -I"$googletest/include" -I"$googletest" -idirafter /usr/include)

"${cxx[@]}" -c src/attention/cpu/neon.cpp -o "$build/neon.o"
library=()
for source in src/base/error.cpp src/page/{map,format}.cpp "$googletest"/src/gtest-all.cc "$googletest"/src/gtest_main.cc; do
    library+=("$build/$(basename "$source").o")
    "${cxx[@]}" -c "$source" -o "${library[-1]}"
done
for test in attention_codes_test attention_simd_test; do
    "${cxx[@]}" "tests/$test.cpp" "${library[@]}" -o "$build/$test" -pthread
    qemu-aarch64 -L /usr/aarch64-linux-gnu "$build/$test" --gtest_brief=1
done
