#!/usr/bin/env bash
# A helper of a Triton kernel returns a tuple that holds None.
#
# Versions: triton 3.6.0 and 3.7.1 (Python 3.11 to 3.13, Linux, no GPU needed: compiled for sm_90).
# Guess: both compile it, since a kernel may be given None for an argument, hand None on, and test it.
# Behaviour: 3.6.0 makes a tensor of every constant in a returned tuple and raises a CompilationError; 3.7.1 compiles it.
# Why it matters: kernels whose arguments may be None run with the newer version alone. The error names no argument.
# Output seen:
#   3.6.0: CompilationError: TypeError("cannot convert None of type <class 'NoneType'> to tensor")
#   3.7.1: compiled
# The script fails if either changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/kernel.py" <<'PY'
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def pair(x, step, y):
    if y is None:
        return x + step, None
    else:
        return x + step, y + step


@triton.jit
def kernel(x, step, y):
    x, y = pair(x, step, y)
    if y is None:
        tl.store(x, 1.0)


source = ASTSource(kernel, {"x": "*fp32", "step": "i32", "y": "constexpr"}, {(2,): None})
try:
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print(f"{triton.__version__}: compiled")
except triton.CompilationError as error:
    reason, last = error, ""
    while reason is not None:
        last, reason = str(reason).strip().splitlines()[-1], reason.__cause__
    print(f"{triton.__version__}: CompilationError: {last}")
    sys.exit("cannot convert None" not in last)
PY
for version in 3.6.0 3.7.1; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -q --disable-pip-version-check "triton==$version" 2> /dev/null
done
export TRITON_CACHE_DIR="$folder/cache"
old=$("$folder/3.6.0/bin/python" "$folder/kernel.py")
new=$("$folder/3.7.1/bin/python" "$folder/kernel.py")
echo "$old"
echo "$new"
[[ $old == "3.6.0: CompilationError: "*"cannot convert None"* ]]
[[ $new == "3.7.1: compiled" ]]
