#!/usr/bin/env bash
# llama.cpp with crumb's cache on a GPU, end to end: the same text and perplexity as on the CPU with a small model, states that
# move between CPU and GPU, and tokens a second of a large shape with random weights beside llama.cpp's own caches.
#
# usage: e2e.sh pack BUILD TO                 on the machine that builds (-DCRUMB_CUDA=ON, a prefix of build.sh --cuda):
#                                             program and shared libraries, for a machine without network
#        e2e.sh run PACK OUT [MODEL TEXT]     on the machine with the GPU; MODEL: a small GGUF, TEXT: a text file of 30 kB
#
# The machine needs a driver, cuBLAS 13 and Python 3 (PyTorch's packages have cuBLAS). DEPTHS of the large shape end at 32k;
# add 131072 for a minute more.
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

small_model() {
    local model=$1 text=$2 where
    head -c 6000 "$text" >"$out/prompt.txt"
    for where in "-ngl 0" "-ngl 99 --no-kv-offload" "-ngl 99"; do
        echo "== $where"
        # shellcheck disable=SC2086
        "$crumb" perplexity -m "$model" -f "$text" -c 2048 --chunks 2 --kv had2 $where 2>&1 | grep -E '^kv:|Final' || true
        "$crumb" run -m "$model" -f "$out/prompt.txt" -c 8192 -n 64 --temp 0 -no-cnv --no-display-prompt --kv had2 $where 2>/dev/null
    done
    "$crumb" perplexity -m "$model" -f "$text" -c 2048 --chunks 2 --kv had2 -ngl 99 --no-kv-offload --kv-attention decoded \
        --kl-divergence-base "$out/base.kld" >/dev/null 2>&1
    for where in "-ngl 99 --no-kv-offload" "-ngl 99" "-ngl 99 -ub 256" "-ngl 99 -ub 4"; do
        echo "== divergence from decoded pages: $where"
        # shellcheck disable=SC2086
        "$crumb" perplexity -m "$model" -f "$text" -c 2048 --chunks 2 --kv had2 $where --kl-divergence \
            --kl-divergence-base "$out/base.kld" 2>&1 | grep -E 'Mean +KLD|Mean PPL\(Q\) ' || true
    done
    for where in "99 0" "0 99"; do
        read -r from to <<<"$where"
        rm -f "$out/state"
        "$crumb" run -m "$model" -f "$out/prompt.txt" -c 8192 -n 1 --temp 0 -no-cnv --kv had2 -ngl "$from" --prompt-cache "$out/state" >/dev/null 2>&1
        echo "== state of -ngl $from goes on with -ngl $to"
        "$crumb" run -m "$model" -f "$out/prompt.txt" -c 8192 -n 32 --temp 0 -no-cnv --no-display-prompt --kv had2 -ngl "$to" \
            --prompt-cache "$out/state" 2>/dev/null
    done
    rm -f "$out/state" "$out/base.kld"
}

large_shape() {
    local cache
    [[ -e $out/8b.gguf ]] || python3 "$tools/random_gguf.py" "$out/8b.gguf" 8b
    for cache in "-fa 1" "-fa 1 -ctk q8_0 -ctv q8_0" "-fa 1 -ctk q4_0 -ctv q4_0" "--kv had2"; do
        # shellcheck disable=SC2086
        "$crumb" bench -m "$out/8b.gguf" -ngl 99 $cache -p 512 -n 32 -d "${DEPTHS:-0,2048,8192,32768}" -r 2 -o jsonl 2>/dev/null |
            tee -a "$out/bench.jsonl" | python3 -c '
import json, sys
for line in sys.stdin:
    r = json.loads(line)
    print(sys.argv[1], "pp" if r["n_prompt"] else "tg", "at", r["n_depth"], round(r["avg_ts"], 1), sep="\t")' "$cache"
    done
    for cache in "-fa on" "--kv had2"; do
        echo "== 8 sequences of 8k: $cache"
        # shellcheck disable=SC2086
        "$crumb" batched-bench -m "$out/8b.gguf" -ngl 99 $cache -c 67584 -npp 8192 -ntg 32 -npl 8 2>/dev/null | grep '^|'
    done
}

case ${1:-} in
    pack) pack "${2:?build folder}" "${3:?target folder}" ;;
    run)
        crumb=$(realpath "${2:?folder that e2e.sh pack made}")/crumb
        mkdir -p "${3:?output folder}"
        out=$(realpath "$3")
        packages=$(python3 -c 'import nvidia, os; print(os.path.join(list(nvidia.__path__)[0], "cu13/lib"))' 2>/dev/null || true)
        export LD_LIBRARY_PATH=${crumb%/crumb}/lib:$packages:/usr/local/cuda/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
        [[ -z ${4:-} ]] || small_model "$(realpath "$4")" "$(realpath "${5:?text}")" | tee "$out/small.txt"
        large_shape | tee "$out/large.txt"
        ;;
    *)
        sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
        exit 2
        ;;
esac
