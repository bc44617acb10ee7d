#!/usr/bin/env bash
# Calibrate a small model once, then ask it about a document with 16-bit KV and with a 2-bit cache.
# usage: demo.sh smollm2|qwen     (make demo builds and fetches first)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
crumb=$here/../${CRUMB_BUILD:-build}/bin/crumb
cache=${CRUMB_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/crumb}
name=${1:-smollm2}

case $name in
    smollm2) tokens=32768 ;;
    qwen) tokens=16384 ;; # 12 times the model: half the tokens, to keep the first run at a few minutes
    *)
        echo "demo: error: there is no demo with '$name'. Type: make demo MODEL=smollm2 or make demo MODEL=qwen" >&2
        exit 2
        ;;
esac

model=$("$here/fetch.py" model "$name")
text=$("$here/fetch.py" text)
artefact=$cache/artefacts/$(basename "$model" .gguf).crumb.safetensors

# Artefacts of an older crumb have no bases of planes.
if ! "$crumb" inspect --artifact "$artefact" 2>/dev/null | grep 'planes:' >/dev/null; then
    echo "demo: calibrating $(basename "$model") on $tokens tokens of prose, technical text and code (once)" >&2
    mkdir -p "$(dirname "$artefact")"
    # without a gradient, to keep the first run short
    "$crumb" calibrate -m "$model" -o "$artefact" --tokens "$tokens" --metric none \
        -f "$text/calibration/docs.txt" -f "$text/calibration/prose.txt" -f "$text/calibration/code.txt"
fi

"$crumb" compare -m "$model" --kv oscar,planes --kv-artifact "$artefact" -f "$text/document.txt" \
    -p "Question: according to the text above, what does it mean when a recv returns 0 bytes? Answer in one sentence." -n 64

cat >&2 <<END

This artefact is of --metric none: planes has 1.5 to 2.5 times the divergence that it has with the default,
which takes half an hour (SmolLM2) to hours (Qwen):
    $crumb calibrate -m $model -o $artefact

Chat with it:
    $crumb chat -m $model --kv planes --kv-artifact $artefact -c 8192
END
