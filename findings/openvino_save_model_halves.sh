#!/usr/bin/env bash
# openvino.save_model: what becomes of constants that float16 cannot hold?
#
# Versions: openvino 2026.4.1 (Python 3.11 to 3.13, CPU).
# Guess: weights are stored in float16 by default; values beyond 65504 become inf, NaN stays, and an epsilon of 1e-12 becomes
#   0, so that a LayerNorm of equal values gives NaN.
# Behaviour: a constant whose values mostly fit is stored in float16, and what does not fit is moved to the nearest value
#   that does: -inf and finfo.min become -65504, NaN becomes 65504, 1e-8 becomes 0. A constant whose values mostly do not
#   fit, such as an epsilon alone, stays in float32. compress_to_fp16=False keeps all.
# Why it matters: a mask of 0 and -inf that was traced as a constant is another one in the file, and a broken weight (NaN) is
#   a number there: a search for NaN in the outputs finds nothing. A query whose keys are all blocked gets the mean of their
#   values from the file, and NaN from the model that was saved. An integer above 2048 in a table may move by one.
# Output seen:
#   -inf among ones: -inf becomes -65504.0
#   finfo.min among ones: -3.4028234663852886e+38 becomes -65504.0
#   NaN among ones: nan becomes 65504.0
#   1e5 among ones: 100000.0 becomes 65504.0
#   1e-8 among ones: 9.99999993922529e-09 becomes 0.0
#   2049 among ones: 2049.0 becomes 2048.0
#   1e-12 alone: kept
#   1e5 alone: kept
#   all of them with compress_to_fp16=False: kept
#   a query without keys, mask of -inf: model NaN, file the mean of the values
# The script fails if any changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/constants.py" <<'PY'
import os

import numpy as np
import openvino as ov
import openvino.opset13 as ops

FILE = os.environ["FOLDER"] + "/model.xml"
CORE, F32 = ov.Core(), {"INFERENCE_PRECISION_HINT": "f32"}


def both(make, given, **options):
    """Return the output of a model and of its file."""
    places = [ops.parameter(a.shape, np.float32) for a in given]
    model = ov.Model([make(*places)], places)
    ov.save_model(model, FILE, **options)
    return [CORE.compile_model(m, "CPU", F32)(given)[0] for m in (model, FILE)]


def word(value, size, **options):
    constant = np.ones(size, np.float32)
    constant[0] = value
    zeros = np.zeros(size, np.float32)
    before, after = both(lambda x: ops.add(x, ops.constant(constant)), [zeros], **options)
    return "kept" if np.array_equal(before, after, equal_nan=True) else f"{before[0]} becomes {after[0]}"


VALUES = {"-inf": -np.inf, "finfo.min": np.finfo(np.float32).min, "NaN": np.nan, "1e5": 1e5, "1e-8": 1e-8, "2049": 2049}
for name, value in VALUES.items():
    print(f"{name} among ones: {word(value, 16)}")
for name, value in (("1e-12", 1e-12), ("1e5", 1e5)):
    print(f"{name} alone: {word(value, 1)}")
(kept,) = {word(value, 16, compress_to_fp16=False) for value in VALUES.values()}
print("all of them with compress_to_fp16=False:", kept)
draws = np.random.default_rng(0)
q, k, v = (draws.standard_normal((1, 1, 4, 8)).astype(np.float32) for _ in range(3))
mask = np.zeros((1, 1, 4, 4), np.float32)
mask[..., 1, :] = -np.inf


def attention(q, k, v):
    scores = ops.add(ops.matmul(q, k, False, True), ops.constant(mask))
    return ops.matmul(ops.softmax(scores, 3), v, False, False)


rows = [out[0, 0, 1] for out in both(attention, [q, k * 1e-3, v])]
words = ["NaN" if np.isnan(r).all() else "the mean of the values" if np.allclose(r, v.mean(2), atol=1e-2) else r for r in rows]
print(f"a query without keys, mask of -inf: model {words[0]}, file {words[1]}")
PY
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check openvino==2026.4.1
seen=$(FOLDER="$folder" "$folder/venv/bin/python" "$folder/constants.py" 2> /dev/null)
echo "$seen"
expected=$(sed -n '/^# Output seen/,/^# The script/p' "$0" | sed '1d;$d;s/^#   //')
[[ $seen == "$expected" ]]
