#!/usr/bin/env bash
# Make a Python environment of the tests and print its folder, pinned by checksum: torch and transformers (1.5 GB), or with
# the argument "vllm" those and vLLM's CPU build (2.9 GB).
#
# PyPI's torch is a CUDA build that wants 3 GB of CUDA libraries. Nothing here calls CUDA, so of those only the runtime is
# installed; the others are empty libraries of the right names, and lazy binding leaves their symbols unresolved.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in
    "") name=base lock=python/tests/requirements.txt ;;
    vllm) name=vllm lock=python/tests/requirements-vllm.txt ;;
    *) echo "python: error: there is no environment '$1'. Type: tools/python.sh, or tools/python.sh vllm" >&2 && exit 1 ;;
esac
cache=${CRUMB_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/crumb}
env=$cache/python/$name-$(cat "$lock" tools/python.sh | sha256sum | head -c 12)
python=$(PATH=/usr/bin:$PATH command -v python3.11) || {
    echo "python: error: the pinned packages are for CPython 3.11, and there is no python3.11. Type: apt-get install python3.11-venv" >&2
    exit 1
}
mkdir -p "$cache/python"
exec 9>"$cache/python/.lock"
flock 9
if [[ ! -e $env/complete ]]; then
    echo "python: installing what $lock names into $env" >&2
    rm -rf "$env"
    "$python" -m venv "$env"
    "$env/bin/python" -m pip --disable-pip-version-check -q --no-cache-dir install --no-deps --require-hashes -r "$lock" >&2
    site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    for name in libcudnn.so.9 libcufile.so.0 libnccl.so.2 libcusparse.so.12 libcufft.so.12 libcusparseLt.so.0 libcurand.so.10 \
        libcublas.so.13 libcublasLt.so.13 libnvrtc.so.13 libcusolver.so.12 libnvshmem_host.so.3 libcupti.so.13; do
        echo 'void stub(void) {}' | cc -shared -fPIC -Wl,-soname,$name -x c - -o "$site/torch/lib/$name"  # on torch's own path
    done
    echo 'import os, sys; sys.setdlopenflags(os.RTLD_LAZY)' >"$site/lazy_binding.py"
    echo 'import lazy_binding' >"$site/lazy_binding.pth"
    touch "$env/complete"
    find "$cache/python" -mindepth 1 -maxdepth 1 -type d -name "$name-*" ! -path "$env" -exec rm -rf {} +  # of older pins
fi
echo "$env"
