#!/usr/bin/env bash
# A Triton kernel calls a helper that reads a global constexpr: is the kernel's cache key one number?
#
# Versions: triton 3.6.0 and 3.9.0 (Python 3.11 to 3.13, Linux, no GPU needed: nothing is compiled).
# Guess: the key depends on the sources and the constants alone, so every process finds what another one compiled.
# Behaviour: in 3.6.0 the kernel's key has the helper's constants only if the helper's key was computed before, say since
#   another kernel that calls it ran first. 3.9.0 has one key.
# Why it matters: the same kernel is compiled and stored twice, and a cache that one program filled misses in another.
# Output seen:
#   3.6.0: two keys
#   3.9.0: one key
# The script fails if either changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/kernel.py" <<'PY'
import sys

import triton
import triton.language as tl

WIDTH = tl.constexpr(16)


@triton.jit
def places():
    return tl.arange(0, WIDTH)


@triton.jit
def kernel(x):
    tl.store(x + places(), 1.0)


if sys.argv[1] == "helper first":
    places.cache_key
print(kernel.cache_key)
PY
for version in 3.6.0 3.9.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -q --disable-pip-version-check "triton==$version" 2> /dev/null
    for order in "helper first" "kernel first"; do
        "$folder/$version/bin/python" "$folder/kernel.py" "$order" 2> /dev/null
    done > "$folder/keys"
    case $(sort -u "$folder/keys" | wc -l) in 1) found="one key" ;; 2) found="two keys" ;; *) found="?" ;; esac
    echo "$version: $found" | tee -a "$folder/found"
done
[[ $(< "$folder/found") == $'3.6.0: two keys\n3.9.0: one key' ]]
