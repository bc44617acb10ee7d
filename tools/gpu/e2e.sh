#!/usr/bin/env bash
# llama.cpp with crumb's cache on a GPU, end to end: the same text and perplexity as on the CPU with a small model, states that
# move between CPU and GPU, and tokens a second of a large shape with random weights beside llama.cpp's own caches.
#
# usage: e2e.sh pack BUILD TO                 on the machine that builds (-DCRUMB_CUDA=ON, a prefix of build.sh --cuda):
#                                             program and shared libraries, for a machine without network
#        e2e.sh small PACK OUT MODEL TEXT [ARTEFACT]   on the machine with the GPU: is it right? MODEL: a small GGUF with F32
#                                             weights, TEXT: a text file of 30 kB, ARTEFACT: of crumb calibrate, for planes
#        e2e.sh two PACK OUT MODEL TEXT       layers on two GPUs: the same text as with one?
#        e2e.sh large PACK OUT [SHAPE [DEPTHS]]  is it fast? SHAPE: of random_gguf.py, 8b by default; DEPTHS: of a context,
#                                             0,2048,8192,32768,131072 by default, prompts up to 65,536
#        e2e.sh many PACK OUT [SHAPE [COUNTS [TOKENS]]]  sequences at once, "8 32" of 8192 tokens by default
#        e2e.sh profile PACK OUT [SHAPE [DEPTH]]  time of a step by kernel (ncu), behind 2048 tokens by default
#
# The machine needs a driver, cuBLAS 13 and Python 3 (PyTorch's packages have cuBLAS).
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
    # shellcheck disable=SC2086
    for where in "-ngl 0" "-ngl 99 --no-kv-offload" "-ngl 99"; do
        echo "== $kv $where"
        "$crumb" perplexity $model -f "$text" -c 2048 --chunks 2 --kv "$kv" $where 2>&1 | grep -E '^kv:|Final|error' || true
        "$crumb" run $model -f "$out/prompt.txt" -c 8192 -n 64 --temp 0 -no-cnv --no-display-prompt --kv "$kv" $where 2>/dev/null
    done
    # shellcheck disable=SC2086
    "$crumb" perplexity $model -f "$text" -c 2048 --chunks 2 --kv "$kv" -ngl 99 --no-kv-offload --kv-attention decoded \
        --kl-divergence-base "$out/base.kld" >/dev/null 2>&1
    # shellcheck disable=SC2086
    for where in "-ngl 99 --no-kv-offload" "-ngl 99" "-ngl 99 -ub 256" "-ngl 99 -ub 64" "-ngl 99 -ub 4"; do
        echo "== $kv, divergence from decoded pages: $where"
        "$crumb" perplexity $model -f "$text" -c 2048 --chunks 2 --kv "$kv" $where --kl-divergence \
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
    rm -f "$out/state" "$out/base.kld"
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

# llama-bench's rows as lines: what, test, depth, tokens a second
rows() {
    tee -a "$out/bench.jsonl" | python3 -c '
import json, sys
for line in sys.stdin:
    r = json.loads(line)
    print(sys.argv[1], "pp" if r["n_prompt"] else "tg", "at", r["n_depth"], round(r["avg_ts"], 1), sep="\t", flush=True)' "$1"
}

large_shape() {
    local cache depth prompt
    for depth in ${1//,/ }; do
        prompt=$((depth > 65536 ? 0 : 512))
        # shellcheck disable=SC2086
        for cache in "--kv had2" "-fa 1" "-fa 1 -ctk q8_0 -ctv q8_0" "-fa 1 -ctk q4_0 -ctv q4_0"; do
            [[ $prompt == 0 && $cache == *-ctk* ]] ||
                "$crumb" bench -m "$model" -ngl 99 $cache -p $prompt -n 32 -d "$depth" -r 2 -o jsonl 2>"$out/bench.err" | rows "$cache"
        done
    done
}

# $1: numbers of sequences, $2: tokens of each
many_sequences() {
    local cache n
    # shellcheck disable=SC2086
    for n in $1; do
        for cache in "--kv had2" "-fa on"; do
            echo "== $n sequences of $2: $cache"
            "$crumb" batched-bench -m "$model" -ngl 99 $cache -c $((n * ($2 + 256))) -npp "$2" -ntg 32 -npl "$n" 2>"$out/many.err" | grep '^|' ||
                grep -E 'error|out of memory' "$out/many.err" | tail -n 2
        done
    done
}

# A thousand launches in a row, taken while tokens are generated (before them come the prompt's), shared out by kernel.
profile_step() {
    ncu --csv --page raw --clock-control none --cache-control none --graph-profiling node --metrics gpu__time_duration.sum --launch-skip 20000 \
        --launch-count 1000 "$crumb" bench -m "$model" -ngl 99 --kv had2 -p 0 -n 128 -d "$1" -r 1 -o jsonl >"$out/profile.csv" 2>"$out/profile.err"
    python3 - "$out/profile.csv" <<'P'
import collections, csv, sys

lines = [line for line in open(sys.argv[1]) if line.startswith('"')]
time, count = collections.Counter(), collections.Counter()
for row in csv.DictReader(lines):
    if not row["ID"]:  # units
        continue
    name = row["Kernel Name"].split("<")[0].split("(")[0].split("::")[-1].strip()
    time[name] += float(row["gpu__time_duration.sum"].replace(",", ""))
    count[name] += 1
whole = sum(time.values())
for name, t in time.most_common():
    print(f"{100 * t / whole:5.1f} %  {t / count[name]:10.1f} each  {count[name]:5} launches  {name}")
P
}

case ${1:-} in
    pack) pack "${2:?build folder}" "${3:?target folder}" ;;
    small | two | large | many | profile)
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
            many) random_model "${4:-8b}" && many_sequences "${5:-8 32}" "${6:-8192}" | tee "$out/many.txt" ;;
            profile) random_model "${4:-8b}" && profile_step "${5:-2048}" | tee "$out/profile.txt" ;;
        esac
        ;;
    *)
        sed -n '2,19s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
        exit 2
        ;;
esac
