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
export PYTHONPATH=$client
# Without --folder, slot files lie on a small disk of this run's own, so that it is full now and then, where we may mount one.
if [[ " $* " != *" --folder "* ]]; then
    alone=(unshare --user --map-root-user --mount bash -c 'mount -t tmpfs -o size=48m soak "$0" && "$@"')
    disk=$(mktemp -d)
    trap 'rmdir "$disk"' EXIT
    if "${alone[@]}" "$disk" true 2>/dev/null; then
        "${alone[@]}" "$disk" python3 "$here/soak.py" "$@" --folder "$disk"
        exit
    fi
    echo "soak: no disk can be mounted here: none will be full" >&2
fi
python3 "$here/soak.py" "$@"
