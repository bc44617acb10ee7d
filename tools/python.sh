#!/usr/bin/env bash
# Make a Python environment of the tests and print its folder, pinned by checksum: torch and transformers (1.6 GB), or with
# the argument "vllm" a layer over that one, with vLLM's CPU build (1.3 GB), and with "sglang" one more, with SGLang (0.8 GB),
# which takes operators from vLLM where it has none for CPUs.
#
# PyPI's torch is a CUDA build that wants 3 GB of CUDA libraries. Nothing here calls CUDA, so of those only the runtime is
# installed; the others are empty libraries of the right names, and lazy binding leaves their symbols unresolved.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in
    "") layers=() ;;
    vllm) layers=(vllm) ;;
    sglang) layers=(vllm sglang) ;;
    *) echo "python: error: there is no environment '$1'. Type: tools/python.sh, or with vllm or sglang" >&2 && exit 1 ;;
esac
cache=${CRUMB_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/crumb}/python
python=$(PATH=/usr/bin:$PATH command -v python3.11) || {
    echo "python: error: the pinned packages are for CPython 3.11, and there is no python3.11. Type: apt-get install python3.11-venv" >&2
    exit 1
}

locks=(tools/python.sh)
folder() { # name lock: an environment is as old as all that it stands on
    locks+=("$2")
    env=$cache/$1-$(cat "${locks[@]}" | sha256sum | head -c 12)
}

site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

install() { # env lock
    echo "python: installing what $2 names into $1" >&2
    rm -rf "$1"
    "$python" -m venv "$1"
    for attempt in 1 2 3; do  # a gigabyte: networks break
        "$1/bin/python" -m pip --disable-pip-version-check -q --no-cache-dir --retries 10 --timeout 60 install --no-deps --require-hashes \
            -r "$2" >&2 && return
        echo "python: attempt $attempt failed" >&2
    done
    echo "python: error: $2 cannot be installed: see above" >&2
    exit 1
}

finish() { # env name
    touch "$1/complete"
    find "$cache" -mindepth 1 -maxdepth 1 -type d -name "$2-*" ! -path "$1" -exec rm -rf {} +  # of older pins
}

mkdir -p "$cache"
exec 9>"$cache/.lock"
flock 9
folder base python/tests/requirements.txt
if [[ ! -e $env/complete ]]; then
    install "$env" python/tests/requirements.txt
    for name in libcudnn.so.9 libcufile.so.0 libnccl.so.2 libcusparse.so.12 libcufft.so.12 libcusparseLt.so.0 libcurand.so.10 \
        libcublas.so.13 libcublasLt.so.13 libnvrtc.so.13 libcusolver.so.12 libnvshmem_host.so.3 libcupti.so.13; do
        echo 'void stub(void) {}' | cc -shared -fPIC -Wl,-soname,$name -x c - -o "$(site "$env")/torch/lib/$name"  # on torch's own path
    done
    echo 'import os, sys; sys.setdlopenflags(os.RTLD_LAZY)' >"$(site "$env")/lazy_binding.py"
    echo 'import lazy_binding' >"$(site "$env")/lazy_binding.pth"
    finish "$env" base
fi
for layer in "${layers[@]}"; do
    below=$env
    folder "$layer" "python/tests/requirements-$layer.txt"
    if [[ ! -e $env/complete ]]; then
        install "$env" "python/tests/requirements-$layer.txt"
        echo "import site; site.addsitedir('$(site "$below")')" >"$(site "$env")/below.pth"
        rm -rf "$(site "$env")"/triton/backends/nvidia/{bin,lib}  # what Triton compiles with, for GPUs: half a gigabyte
        finish "$env" "$layer"
    fi
done
echo "$env"
