#!/usr/bin/env bash
# soak.py with the official OpenAI client, which is put into the cache folder once, from pinned files (requirements.txt).
# usage: run.sh CRUMB MODEL_F32.gguf [options of soak.py]
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${CRUMB_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/crumb}
client=$cache/openai-$(sha256sum <"$here/requirements.txt" | cut -c1-12)
if [[ ! -f $client/complete ]]; then
    echo "soak: fetching the OpenAI client into $client" >&2
    mkdir -p "$cache"
    part=$(mktemp -d "$cache/openai-part.XXXXXX")
    trap 'rm -rf "$part"' EXIT
    python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps --require-hashes --only-binary :all: \
        --target "$part" -r "$here/requirements.txt" || {
        echo "soak: error: pip could not fetch the packages of $here/requirements.txt (Python 3.11 is wanted, here is $(python3 -V))" >&2
        exit 1
    }
    touch "$part/complete"
    rm -rf "$client"
    mv "$part" "$client"
    trap - EXIT
fi
PYTHONPATH=$client exec python3 "$here/soak.py" "$@"
