#!/usr/bin/env bash
# llama.cpp with crumb's cache on a GPU, end to end: the same text and perplexity as on the CPU with a small model, states that
# move between CPU and GPU, and tokens a second of a large shape with random weights beside llama.cpp's own caches.
#
# usage: e2e.sh pack BUILD TO                 on the machine that builds (-DCRUMB_CUDA=ON, a prefix of build.sh --cuda):
#                                             program and shared libraries, for a machine without network
#        on the machine with the GPU, is it right?
#        e2e.sh small PACK OUT MODEL TEXT [ARTEFACT]   MODEL: a small GGUF with F32 weights, TEXT: a text file of 120 kB,
#                                             ARTEFACT: of crumb calibrate, for planes
#        e2e.sh two PACK OUT MODEL TEXT       layers on two GPUs: the same text as with one?
#        is it fast? SHAPE: of random_gguf.py, 8b by default
#        e2e.sh large PACK OUT [SHAPE [DEPTHS]]  one sequence; DEPTHS: 0,2048,8192,32768,131072 by default
#        e2e.sh many PACK OUT [SHAPE [COUNTS [TOKENS]]]  sequences at once, 8,32,64 of 0 and of 32768 tokens by default
#        e2e.sh fit PACK OUT [SHAPE [TOKENS]] how many sequences of 32768 tokens fit
#        e2e.sh host PACK OUT [SHAPE [SIZE [DEPTH]]]  pages in main memory (300M of those of 32768 tokens) beside the whole cache there
#        e2e.sh profile PACK OUT [SHAPE [DEPTH]]  time of a step by kernel (ncu), behind 2048 tokens by default
#
# The machine needs a driver, cuBLAS 13 and Python 3 (PyTorch's packages have cuBLAS). Speed: alone on its GPU and on 4 cores; more
# threads than cores make every step longer.
set -euo pipefail
tools=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

pack() {
    local build=$1 to=$2 bin
    bin=$(sed -n 's/^CRUMB_LLAMA_PREFIX:[A-Z]*=//p' "$build/CMakeCache.txt")/build/bin
    mkdir -p "$to/lib"
    strip --strip-unneeded -o "$to/crumb" "$build/bin/crumb"
    for library in "$bin"/lib*-impl.so "$bin"/lib{ggml,ggml-base,ggml-cpu,ggml-cuda,llama,llama-common,mtmd}.so.0; do
        cp -L "$library" "$to/lib/"
    done
    ldd "$build/bin/crumb" | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' |
        grep -vE "^$bin/|/(libc|libm|libdl|librt|libpthread|libcuda|libgcc_s|libstdc\+\+|ld-linux.*)\.so" | xargs -r cp -Lut "$to/lib"
    chmod u+w "$to"/lib/*
    strip --strip-unneeded "$to"/lib/*
    du -sh "$to"
}

# $1: -m MODEL and what goes with the recipe, $2: recipe, $3: text
small_model() {
    local model=$1 kv=$2 text=$3 where from to
    head -c 6000 "$text" >"$out/prompt.txt"
    head -c 60000 "$text" >"$out/windows.txt"
    # shellcheck disable=SC2086
    for where in "-ngl 0" "-ngl 99 --no-kv-offload" "-ngl 99"; do
        echo "== $kv $where"
        "$crumb" perplexity $model -f "$out/windows.txt" -c 2048 --chunks 2 --kv "$kv" $where 2>&1 | grep -E '^kv:|Final|error' || true
        "$crumb" run $model -f "$out/prompt.txt" -c 8192 -n 64 --temp 0 -no-cnv --no-display-prompt --kv "$kv" $where 2>/dev/null
    done
    # shellcheck disable=SC2086
    "$crumb" perplexity $model -f "$out/windows.txt" -c 2048 --chunks 2 --kv "$kv" -ngl 99 --no-kv-offload --kv-attention decoded \
        --kl-divergence-base "$out/base.kld" >/dev/null 2>&1
    # shellcheck disable=SC2086
    for where in "-ngl 99 --no-kv-offload" "-ngl 99" "-ngl 99 -ub 256" "-ngl 99 -ub 64" "-ngl 99 -ub 4"; do
        echo "== $kv, divergence from decoded pages: $where"
        "$crumb" perplexity $model -f "$out/windows.txt" -c 2048 --chunks 2 --kv "$kv" $where --kl-divergence \
            --kl-divergence-base "$out/base.kld" 2>&1 | grep -E 'Mean +KLD|Mean PPL\(Q\) |error' || true
    done
    # shellcheck disable=SC2086
    for where in "99 0" "0 99"; do
        read -r from to <<<"$where"
        rm -f "$out/state"
        "$crumb" run $model -f "$out/prompt.txt" -c 8192 -n 1 --temp 0 -no-cnv --kv "$kv" -ngl "$from" --prompt-cache "$out/state" >/dev/null 2>&1
        echo "== $kv, state of -ngl $from goes on with -ngl $to"
        "$crumb" run $model -f "$out/prompt.txt" -c 8192 -n 32 --temp 0 -no-cnv --no-display-prompt --kv "$kv" -ngl "$to" \
            --prompt-cache "$out/state" 2>/dev/null
    done
    main_memory "$model" "$kv" "$text"
    rm -f "$out/state" "$out/base.kld"
}

# 30,000 tokens whose pages all lie on the GPU, some or all of them in main memory; a state of one goes on in the other.
main_memory() {
    local model=$1 kv=$2 host name
    head -c 120000 "$3" >"$out/prompt.txt"
    rm -f "$out/state"
    # shellcheck disable=SC2086
    long() { "$crumb" run $model -f "$out/prompt.txt" -c 65536 --temp 0 -no-cnv --no-display-prompt -ngl 99 --kv "$kv" "$@"; }
    # shellcheck disable=SC2086
    for host in "" "--kv-host-memory 140M" "--kv-host-memory 1G"; do
        name=$out/text.${host##* }
        long -n 64 $host >"$name" 2>"$out/run.err" || tail -n 2 "$out/run.err"
        echo "== $kv, 30,000 tokens $host: $(grep -o 'whose last.*' "$out/run.err" || true)"
        cmp "$name" "$out/text." && echo "the same text"
    done
    long -n 1 --kv-host-memory 140M --prompt-cache "$out/state" >/dev/null 2>&1
    long -n 64 --prompt-cache "$out/state" 2>/dev/null | cmp - "$out/text." && echo "restored from main memory: the same text"
}

# $1: shape
random_model() {
    model=$out/$1.gguf
    [[ -e $model ]] || { python3 "$tools/random_gguf.py" "$model.part" "$1" && mv "$model.part" "$model"; }
}

# $1: model, $2: text
two_gpus() {
    local kv gpus
    head -c 6000 "$2" >"$out/prompt.txt"
    # shellcheck disable=SC2086
    for kv in "-fa on" "--kv had2"; do
        for gpus in 0 0,1; do
            CUDA_VISIBLE_DEVICES=$gpus "$crumb" run -m "$1" -f "$out/prompt.txt" -c 8192 -n 64 --temp 0 -no-cnv --no-display-prompt \
                -ngl 99 --split-mode layer $kv >"$out/text.$gpus" 2>"$out/text.$gpus.err" || tail -n 3 "$out/text.$gpus.err"
        done
        if [[ -s $out/text.0 ]] && cmp -s "$out/text.0" "$out/text.0,1"; then
            echo "$kv: the same text"
        else
            echo "$kv: another text"
            head -n 20 "$out/text.0" "$out/text.0,1"
        fi
    done
}

# depth-bench: name of the cache, arguments
speed() {
    local name=$1
    shift
    echo "== $name: $*"
    "$crumb" depth-bench -m "$model" --gpu-layers 99 -t 4 "$@" 2>"$out/bench.err" | tee -a "$out/bench.jsonl" ||
        grep -E 'error|out of memory' "$out/bench.err" | tail -n 2
}

large_shape() {
    speed f16 -d "$1" -n 64
    speed had2 --kv had2 -d "$1" -n 64
    speed q8_0 --cache-type q8_0 -d "$1" -n 64
    speed q4_0 --cache-type q4_0 -d "$1" -n 64
}

# $1: numbers of sequences, $2: tokens of each
many_sequences() {
    local tokens count
    for tokens in 0 "$2"; do
        speed had2 --kv had2 -d "$tokens" -s "$1" -n 16 -p 0
        for count in ${1//,/ }; do # each alone: what does not fit takes nothing with it
            speed f16 -d "$tokens" -s "$count" -n 16 -p 0 --ubatch-size 512
        done
    done
}

# $1: tokens of each. The most sequences with which a context is made and a step is run.
fit() {
    local cache least most n
    # shellcheck disable=SC2086
    for cache in "" "--kv had2"; do
        least=0 most=1024
        while ((most - least > 1)); do
            n=$(((least + most) / 2))
            if "$crumb" depth-bench -m "$model" --gpu-layers 99 -t 4 $cache -d 0 -s "$n" --shared --room "$1" -n 2 -p 0 --ubatch-size 512 >/dev/null 2>&1; then
                least=$n
            else
                most=$n
            fi
        done
        echo "${cache:-f16}: $least sequences of $1 tokens"
    done
}

# $1: bytes of pages, $2: depth
host_memory() {
    speed "had2" --kv had2 -d "$2" -n 32
    speed "had2, $1 of the pages in main memory" --kv had2 --kv-host-memory "$1" -d "$2" -n 32
    # The prompt is computed on the GPU; its state goes on with the cache on the CPU.
    "$crumb" bench -m "$model" -ngl 99 -fa 1 -nkvo 0,1 -d "$2" -p 0 -n 8 -r 1 -t "$(nproc)" -o jsonl 2>"$out/bench.err" | python3 -c '
import json, sys
for line in sys.stdin:
    r = json.loads(line)
    print("f16, cache on the", "CPU:" if r["no_kv_offload"] else "GPU:", round(r["avg_ts"], 2), "tokens a second")'
}

# Launches in a row, taken while tokens are generated, shared out by kernel. Without CUDA graphs, whose nodes cannot be skipped.
profile_step() {
    GGML_CUDA_DISABLE_GRAPHS=1 ncu --csv --page raw --clock-control none --cache-control none --metrics gpu__time_duration.sum \
        --launch-skip $((8000 + $1 / 3)) --launch-count 2400 "$crumb" depth-bench -m "$model" --gpu-layers 99 -t 4 --kv had2 -p 0 -n 40 -d "$1" \
        >"$out/profile.csv" 2>"$out/profile.err"
    python3 - "$out/profile.csv" <<'P'
import collections, csv, re, sys

lines = [line for line in open(sys.argv[1]) if line.startswith('"')]
time, count = collections.Counter(), collections.Counter()
for row in csv.DictReader(lines):
    if not row["ID"]:  # units
        continue
    name = re.findall(r"\w+", re.sub(r"<.*", "", row["Kernel Name"].replace("<unnamed>::", "").split("(")[0]))[-1]
    time[name] += float(row["gpu__time_duration.sum"].replace(",", ""))
    count[name] += 1
whole = sum(time.values())
for name, t in time.most_common():
    print(f"{100 * t / whole:5.1f} %  {t / count[name]:10.1f} ns each  {count[name]:5} launches  {name}")
P
}

case ${1:-} in
    pack) pack "${2:?build folder}" "${3:?target folder}" ;;
    small | two | large | many | fit | host | profile)
        crumb=$(realpath "${2:?folder that e2e.sh pack made}")/crumb
        mkdir -p "${3:?output folder}"
        out=$(realpath "$3")
        packages=$(python3 -c 'import nvidia, os; print(os.path.join(list(nvidia.__path__)[0], "cu13/lib"))' 2>/dev/null || true)
        export LD_LIBRARY_PATH=${crumb%/crumb}/lib:$packages:/usr/local/cuda/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
        case $1 in
            small)
                model=$(realpath "${4:?model}") text=$(realpath "${5:?text}")
                small_model "-m $model" had2 "$text" | tee "$out/had2.txt"
                [[ -z ${6:-} ]] || small_model "-m $model --kv-artifact $(realpath "$6")" planes "$text" | tee "$out/planes.txt"
                ;;
            two) two_gpus "$(realpath "${4:?model}")" "$(realpath "${5:?text}")" | tee "$out/two.txt" ;;
            large) random_model "${4:-8b}" && large_shape "${5:-0,2048,8192,32768,131072}" | tee "$out/large.txt" ;;
            many) random_model "${4:-8b}" && many_sequences "${5:-8,32,64}" "${6:-32768}" | tee "$out/many.txt" ;;
            fit) random_model "${4:-8b}" && fit "${5:-32768}" | tee "$out/fit.txt" ;;
            host) random_model "${4:-8b}" && host_memory "${5:-300M}" "${6:-32768}" | tee "$out/host.txt" ;;
            profile) random_model "${4:-8b}" && profile_step "${5:-2048}" | tee "$out/profile.txt" ;;
        esac
        ;;
    *)
        sed -n '2,19s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
        exit 2
        ;;
esac
