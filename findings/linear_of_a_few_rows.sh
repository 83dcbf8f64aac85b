#!/usr/bin/env bash
# F.linear of 1 to 8 rows on one core, as in decoding: how does its time grow with the rows?
#
# Versions: torch 2.13.0 (Python 3.11 and 3.13; AMD EPYC with AVX-512 and bfloat16, one thread). MKL and oneDNN choose by
#   processor: on another one the script may fail.
# Guess: each row adds some time, but for the fourth, where another kernel begins: four rows take less than three. For one row
#   bfloat16 is 1.9 times as fast as float32, as it is for many.
# Behaviour: in float32 three rows take 2.9 times as long as one, and it is seven that take longer than eight. In bfloat16
#   eight rows take less than twice as long as one, but one row takes longer than in float32 (1,024 x 1,024: 96 and 72
#   microseconds).
# Why it matters: a float32 decoder reads its weights again for each of a few sentences. A batch that shrinks from eight to
#   seven gets slower, and a comparison of dtypes at one sentence has the other winner at two.
# Output seen, the last line for 1,024 x 1,024 alone:
#   768 x 3072: float32, 3 rows by 1: above 2; 7 rows by 8: above 1; bfloat16, 8 rows by 1: below 2
#   1024 x 1024: float32, 3 rows by 1: above 2; 7 rows by 8: above 1; bfloat16, 8 rows by 1: below 2
#   bfloat16 by float32, one row: above 1; two rows: below 1
# The script fails if any changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/rows.py" <<'PY'
import time

import torch
from torch.nn.functional import linear

torch.set_num_threads(1)
torch.manual_seed(0)


@torch.no_grad()
def least(rows, width, out, dtype):
    """Return the least time of many calls."""
    x, weight, bias = (torch.randn(shape, dtype=dtype) for shape in ((rows, width), (out, width), (out,)))
    best, end = float("inf"), time.perf_counter() + 2
    while time.perf_counter() < end:
        start = time.perf_counter()
        linear(x, weight, bias)
        best = min(best, time.perf_counter() - start)
    return best


def beside(a, b, bound):
    return f"{'above' if a / b > bound else 'below'} {bound}"


for width, out in ((768, 3072), (1024, 1024)):
    single = {n: least(n, width, out, torch.float32) for n in (1, 2, 3, 7, 8)}
    half = {n: least(n, width, out, torch.bfloat16) for n in (1, 2, 8)}
    print(f"{width} x {out}: float32, 3 rows by 1: {beside(single[3], single[1], 2)}; "
          f"7 rows by 8: {beside(single[7], single[8], 1)}; bfloat16, 8 rows by 1: {beside(half[8], half[1], 2)}")
print(f"bfloat16 by float32, one row: {beside(half[1], single[1], 1)}; two rows: {beside(half[2], single[2], 1)}")
PY
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6
seen=$("$folder/venv/bin/python" "$folder/rows.py" 2> /dev/null)
echo "$seen"
expected=$(sed -n '/^# Output seen/,/^# The script/p' "$0" | sed '1d;$d;s/^#   //')
[[ $seen == "$expected" ]]
