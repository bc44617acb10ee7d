#!/usr/bin/env bash
# Install the Debian packages that building, testing and fetching need: only those that are missing.
# usage: setup.sh [--list]     (--list prints the names and installs nothing)
set -euo pipefail

# compile, link, generate
build=(g++ make cmake ninja-build ccache pkg-config git)
# linked or included
libraries=(libeigen3-dev nlohmann-json3-dev libcli11-dev libxxhash-dev libfmt-dev libzip-dev)
# tests and benches; clang brings libFuzzer and the sanitizers of the fuzz targets
tests=(libgtest-dev librapidcheck-dev clang libclang-rt-14-dev clang-format)
# fetching models, text and sources
fetch=(python3 python3-pip python3-venv ca-certificates)
packages=("${build[@]}" "${libraries[@]}" "${tests[@]}" "${fetch[@]}")

if [[ ${1:-} == --list ]]; then
    printf '%s\n' "${packages[@]}"
    exit 0
fi
if [[ $# -gt 0 ]]; then
    echo "usage: setup.sh [--list]" >&2
    exit 2
fi
if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    {
        echo "setup: error: this is not Debian: install the counterparts of these packages yourself:"
        echo "  ${packages[*]}"
    } >&2
    exit 1
fi

declare -A installed=()
while read -r status name; do
    [[ $status == ii ]] && installed[$name]=1
done < <(dpkg-query -W -f '${db:Status-Abbrev} ${Package}\n' "${packages[@]}" 2>/dev/null || true)
missing=()
for name in "${packages[@]}"; do
    [[ -n ${installed[$name]:-} ]] || missing+=("$name")
done
if [[ ${#missing[@]} -eq 0 ]]; then
    echo "setup: all ${#packages[@]} Debian packages are here" >&2
    exit 0
fi
if [[ $EUID -ne 0 ]]; then
    {
        echo "setup: error: ${#missing[@]} Debian packages are missing, and installing them needs root. Type:"
        echo "  sudo apt-get update && sudo apt-get install --no-install-recommends ${missing[*]}"
    } >&2
    exit 1
fi

echo "setup: installing ${missing[*]}" >&2
log=$(mktemp)
trap 'rm -f "$log"' EXIT
install() {
    DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o Dpkg::Use-Pty=0 install --no-install-recommends "${missing[@]}" >"$log" 2>&1 </dev/null
}
# package lists may be there and good: ask for new ones only when installing fails without
if ! install; then
    echo "setup: package lists are missing or old: apt-get update" >&2
    if ! apt-get -qq update >"$log" 2>&1 </dev/null || ! install; then
        {
            echo "setup: error: apt-get could not install ${missing[*]}:"
            tail -n 12 "$log" | sed 's/^/  | /'
            echo "  is the network up, and is this Debian 12 (bookworm)? then type: make setup"
        } >&2
        exit 1
    fi
fi
echo "setup: done" >&2
