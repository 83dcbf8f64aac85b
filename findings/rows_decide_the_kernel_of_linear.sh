#!/usr/bin/env bash
# F.linear on a CPU: does a row of the result depend on how many other rows there are?
#
# Versions: torch 2.13.0 (Python 3.11 to 3.13), and once 2.11.0 and 2.14.1; AMD EPYC with AVX-512 and bfloat16, one thread.
#   The sizes at which MKL changes its kernel may be others on another processor.
# Guess: in float32 one row alone, which is a product of a matrix and a vector; from two rows on all bits are equal. In
#   bfloat16 all are equal.
# Behaviour: in float32 there are three kernels: one row, two or three, and four or more. Each adds in another order. The
#   borders are the same for each width that was tried. oneDNN in bfloat16 has equal bits for each number of rows.
# Why it matters: a batch that shrinks while it is decoded (4, 3, 2, 1 sentences) changes its last bits at two places, and
#   with them a choice between two words that are nearly equal. A test that compares a batch with its sentences bit for bit
#   passes for 4 and 5 sentences, and fails for 3.
# Output seen:
#   float32, rows of equal bits: 1; 2 to 3; 4 to 129
#   bfloat16, rows of equal bits: 1 to 129
# The script fails if any changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/rows.py" <<'PY'
import torch
from torch.nn.functional import linear

torch.set_num_threads(1)
for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
    found = set()
    for width, out in ((64, 512), (512, 512), (512, 2048), (768, 3072), (1024, 1000)):
        torch.manual_seed(0)
        x, weight, spans, last = torch.randn(129, width, dtype=dtype), torch.randn(out, width, dtype=dtype), [], None
        for rows in range(1, 130):
            first = linear(x[:rows], weight)[0]
            if last is None or not torch.equal(first, last):
                spans.append([rows, rows])
            spans[-1][1], last = rows, first
        found.add("; ".join(str(a) if a == b else f"{a} to {b}" for a, b in spans))
    print(f"{name}, rows of equal bits: {' or '.join(sorted(found))}")
PY
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6
seen=$("$folder/venv/bin/python" "$folder/rows.py" 2> /dev/null)
echo "$seen"
expected=$(sed -n '/^# Output seen/,/^# The script/p' "$0" | sed '1d;$d;s/^#   //')
[[ $seen == "$expected" ]]
