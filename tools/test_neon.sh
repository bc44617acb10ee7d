#!/usr/bin/env bash
# The NEON level where no Arm machine is at hand: cross-compiles pages, recipes, attention and their tests, and runs those
# under emulation, in some ten minutes. What they do not call (files of artefacts and their libraries) the linker leaves out.
# Debian: g++-aarch64-linux-gnu qemu-user googletest libeigen3-dev
set -euo pipefail
cd "$(dirname "$0")/.."

build=${1:-build/neon}
googletest=/usr/src/googletest/googletest
mkdir -p "$build"
cxx=(aarch64-linux-gnu-g++ -std=c++20 -O2 -ffp-contract=off -Wall -Wextra -Wno-unused-function -ffunction-sections
     -DFMT_HEADER_ONLY -Iinclude -Isrc -Itests -I"$googletest/include" -I"$googletest" -I/usr/include/eigen3 -idirafter /usr/include)

# compile SOURCE [FLAGS]: an object in $build, kept while it is newer than its source and all headers
newest=$(find include src tests -name '*.h' -o -name '*.inl' | xargs ls -t | head -n 1)
objects=()
compile() {
    local object="$build/${1//\//_}.o"
    objects+=("$object")
    if [[ $object -nt $1 && $object -nt $newest ]]; then return; fi
    "${cxx[@]}" "${@:2}" -c "$1" -o "$object"
}

for source in src/base/error.cpp src/page/*.cpp src/recipe/*.cpp src/attention/{plan,reference,decoded}.cpp \
              src/attention/cpu/{attend,isa,maps}.cpp src/calibrate/{artefact,page_sums}.cpp; do
    compile "$source"
done
compile src/attention/cpu/portable.cpp -O3
compile src/attention/cpu/neon.cpp -O3 -march=armv8.2-a+dotprod
for source in src/recipe/lanes/{project,minmax,gain}.cpp; do
    compile "$source" -O3 -fno-math-errno -DCRUMB_LEVEL=portable '-DCRUMB_LEVEL_NAME="portable"'
done
for source in "$googletest"/src/gtest-all.cc "$googletest"/src/gtest_main.cc; do compile "$source"; done
library=$build/library.a
rm -f "$library"
aarch64-linux-gnu-ar rcs "$library" "${objects[@]}"

for test in attention_codes attention_simd attention_order attention; do
    "${cxx[@]}" -march=armv8.2-a+dotprod "tests/${test}_test.cpp" "$library" -o "$build/$test" -pthread -Wl,--gc-sections
    echo "$test"
    qemu-aarch64 -L /usr/aarch64-linux-gnu "$build/$test" --gtest_brief=1
done
