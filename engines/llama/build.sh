#!/usr/bin/env bash
# Build the pinned llama.cpp with crumb's hooks, once, into the cache folder. Prints the prefix: PREFIX/src, PREFIX/build.
# usage: build.sh [--prefix] [--cuda ARCHITECTURES]
#   --prefix  prints the prefix of a finished build, and fails if there is none
#   --cuda    with llama.cpp's CUDA backend (needs nvcc and cuBLAS), for example: --cuda 90
#
# The prefix is named by everything that decides what comes out: source archive, hooks, compiler, options, CPU
# instruction sets. So a change of any of them, or a cache folder carried to another CPU, means another folder and a new
# build, never a stale or a crashing one. A build counts only once its file `complete` is there, which is written last.
set -euo pipefail

{ # a shell reads its script while it runs; a group is read whole, so this file may be edited meanwhile

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
tools=$here/../../tools
cache=${CRUMB_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/crumb}
mkdir -p "$cache"
cache=$(cd "$cache" && pwd)
jobs=${CRUMB_JOBS:-$(nproc)}

say() { echo "llama.cpp: $*" >&2; }
die() {
    echo "llama.cpp: error: $*" >&2
    exit 1
}

only_prefix=
cuda=
while (($# > 0)); do
    case $1 in
        --prefix) only_prefix=1 ;;
        --cuda)
            cuda=${2:?--cuda takes architectures, for example 90}
            shift
            ;;
        *)
            echo "usage: build.sh [--prefix] [--cuda ARCHITECTURES]" >&2
            exit 2
            ;;
    esac
    shift
done

for tool in python3 cmake ninja c++; do
    command -v "$tool" >/dev/null || die "there is no $tool here. Type: make setup"
done

# Instruction sets are named one by one from what this CPU says it has, never -march=native: the names are in the key.
isa=()
case $(uname -m) in
    x86_64)
        flags=" $(sed -n '/^flags/{s/^[^:]*://p;q}' /proc/cpuinfo) "
        has() {
            local flag
            for flag in "$@"; do [[ $flags == *" $flag "* ]] || return 1; done
        }
        # llama.cpp takes these for granted unless told otherwise
        for pair in SSE42:sse4_2 AVX:avx F16C:f16c AVX2:avx2 BMI2:bmi2 FMA:fma; do
            has "${pair#*:}" || isa+=("-DGGML_${pair%%:*}=OFF")
        done
        if has avx512f avx512cd avx512vl avx512dq avx512bw; then
            isa+=(-DGGML_AVX512=ON)
            for pair in AVX512_VNNI:avx512_vnni AVX512_VBMI:avx512vbmi AVX512_BF16:avx512_bf16; do
                if has "${pair#*:}"; then isa+=("-DGGML_${pair%%:*}=ON"); fi
            done
            # AMX stays off: _tile_loadconfig of GCC 12.2 reads 8 of the 64 bytes of the tile shapes, the compiler drops
            # the others as never read, and the first tile instruction is then an illegal one
        elif has avx2 avx_vnni; then
            isa+=(-DGGML_AVX_VNNI=ON)
        fi
        ;;
    aarch64)
        features=" $(sed -n '/^Features/{s/^[^:]*://p;q}' /proc/cpuinfo) "
        arch=armv8-a
        if [[ $features == *" asimddp "* && $features == *" asimdhp "* ]]; then arch=armv8.2-a+dotprod+fp16; fi
        if [[ $arch == *dotprod* && $features == *" i8mm "* ]]; then arch+=+i8mm; fi
        isa+=("-DGGML_CPU_ARM_ARCH=$arch")
        ;;
esac

options=(
    -DCMAKE_BUILD_TYPE=Release
    -DBUILD_SHARED_LIBS=ON
    -DGGML_NATIVE=OFF
    "${isa[@]}"
    -DGGML_OPENMP=OFF # ggml's own thread pool: crumb's nodes run on it, and no second pool gets in its way
    -DGGML_CCACHE=ON
    -DLLAMA_BUILD_APP=OFF
    -DLLAMA_BUILD_TESTS=OFF
    -DLLAMA_BUILD_EXAMPLES=OFF
    -DLLAMA_BUILD_TOOLS=ON
    -DLLAMA_BUILD_SERVER=ON
    -DLLAMA_CURL=OFF
    -DLLAMA_OPENSSL=OFF
    -DLLAMA_USE_PREBUILT_UI=OFF # it would be downloaded
)
hooks=()
if [[ -n $cuda ]]; then
    nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null) || die "--cuda needs nvcc, and there is none in PATH or /usr/local/cuda"
    options+=(-DGGML_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=$cuda" "-DCMAKE_CUDA_COMPILER=$nvcc" -DGGML_CUDA_NCCL=OFF)
    hooks=(--cuda)
fi
# the tools of llama.cpp as libraries: crumb's program calls their entry points
targets=(llama-server-impl llama-completion-impl llama-cli-impl llama-perplexity-impl llama-bench-impl
    llama-batched-bench-impl llama-quantize-impl)
# what is needed of the archive's llama.cpp folder
members=(CMakeLists.txt LICENSE licenses cmake common ggml include models/templates scripts src tools vendor)

read -r archive_sha256 folder < <(python3 -c '
import json, sys
pin = json.load(open(sys.argv[1]))["llama"]
print(pin["sha256"], pin["folder"])' "$tools/pins.json")
identity=$(
    echo "archive $archive_sha256"
    echo "hooks $("$here/hooks.py" --list "${hooks[@]}" | sha256sum | cut -d' ' -f1)"
    echo "compiler $(c++ --version | head -n 1)"
    [[ -z $cuda ]] || echo "cuda $("$nvcc" --version | tail -n 1)"
    echo "machine $(uname -sm)"
    printf 'option %s\n' "${options[@]}"
    printf 'target %s\n' "${targets[@]}"
)
key=$(sha256sum <<<"$identity" | cut -c1-12)
prefix=$cache/llama.cpp/$key

if [[ -f $prefix/complete ]]; then
    cd -P "$prefix" && pwd # a link is followed: what was compiled against the folder stays good
    exit 0
fi
if [[ -n $only_prefix ]]; then
    [[ -z $cuda ]] || die "not built yet. Type: engines/llama/build.sh --cuda $cuda"
    die "not built yet. Type: make setup"
fi

mkdir -p "$cache/llama.cpp"
# held until the last process of a build is gone, also when this script was killed and its compilers were not
exec 9>"$cache/llama.cpp/.lock"
if ! flock -n 9; then
    say "another build is running: waiting for it"
    flock 9
fi
if [[ -f $prefix/complete ]]; then
    cd -P "$prefix" && pwd
    exit 0
fi

need=1500 # MB, of source and objects
free=$(df -Pm "$cache" | awk 'NR == 2 { print $4 }')
((free >= need)) || die "no room in $cache: $need MB needed, $free MB free. Free some, or: export CRUMB_CACHE=/some/folder"

archive=$("$tools/fetch.py" llama)
# what an interrupted build left is not trusted; ccache makes doing it again cheap
rm -rf "$prefix"
mkdir -p "$prefix/src"
say "unpacking"
tar -xzf "$archive" -C "$prefix/src" --strip-components="$(($(tr -cd / <<<"$folder" | wc -c) + 1))" \
    "${members[@]/#/$folder/}"
"$here/hooks.py" "${hooks[@]}" "$prefix/src" >"$prefix/build.log"

say "configuring (${isa[*]:-default instruction sets})"
# paths below the cache folder are not part of what ccache remembers, so a new key compiles only what changed
export CCACHE_BASEDIR=$cache/llama.cpp CCACHE_NOHASHDIR=1
unset CFLAGS CXXFLAGS CPPFLAGS LDFLAGS CMAKE_GENERATOR
# name and number of the build are not asked of a git repository that happens to be around the cache folder
cmake -S "$prefix/src" -B "$prefix/build" -G Ninja "${options[@]}" -DLLAMA_BUILD_COMMIT="${archive_sha256:0:8}" \
    -DLLAMA_BUILD_NUMBER=0 -DCMAKE_C_COMPILER=cc -DCMAKE_CXX_COMPILER=c++ >>"$prefix/build.log" 2>&1 </dev/null || {
    tail -n 20 "$prefix/build.log" >&2
    die "configuring failed; the whole log: $prefix/build.log"
}

say "building with $jobs jobs; the first time takes minutes"
build() { cmake --build "$prefix/build" -j "$jobs" --target "${targets[@]}" </dev/null; }
if [[ -t 2 ]]; then
    build >&2
else
    build 2>&1 | tee -a "$prefix/build.log" | awk '
        /^\[[0-9]+\/[0-9]+\]/ { if (++n % 20 == 0) { print "llama.cpp: " $1; fflush() } next }
        /error|FAILED/ { print; fflush() }' >&2
fi || die "building failed; the whole log: $prefix/build.log"

# objects are not needed to link against the result
find "$prefix/build" -name '*.o' -delete
printf '%s\n' "$identity" >"$prefix/complete.part"
mv "$prefix/complete.part" "$prefix/complete"
say "built in ${SECONDS} s"
echo "$prefix"
exit
}
