#!/usr/bin/env bash
# scaled_dot_product_attention exported to ONNX: what does a query get whose keys are all masked?
#
# Versions: torch 2.13.0, onnx 1.23.2, onnxscript 0.7.2, onnxruntime 1.32.0 (Python 3.11 to 3.13, CPU).
# Guess: the runtime decides: NaN where softmax is an operator of its own, zeros as in PyTorch from opset 23 on, where
#   attention is one.
# Behaviour: exporter, opset and dtype of the mask decide, three ways. A bool mask gives zeros from the older exporter
#   and from opset 23 on, and the mean of all values, masked ones too, from the newer exporter below opset 23: there a
#   blocked score is the least finite number. A mask of -inf gives NaN below opset 23. onnx.reference gives the same.
# Why it matters: the mean of the masked values looks like any other output. A padded batch with one empty sentence
#   passes every search for NaN, and differs from PyTorch.
# Output seen:
#   PyTorch: bool zeros, float zeros
#   newer exporter, opset 18: bool mean, float NaN
#   newer exporter, opset 23: bool zeros, float zeros
#   older exporter, opset 18: bool zeros, float NaN
# The script fails if any changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/rows.py" <<'PY'
import os

import onnxruntime
import torch
from onnx.reference import ReferenceEvaluator

NAMES = ["q", "k", "v", "mask"]


class Attention(torch.nn.Module):
    def forward(self, q, k, v, mask):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)


def word(row, mean):
    if row.isnan().all():
        return "NaN"
    return "zeros" if not row.any() else "mean" if torch.allclose(row, mean, atol=1e-5) else "?"


torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 2, 4, 8)
keep = torch.ones(4, 4, dtype=torch.bool).tril()
keep[2] = False
masks = keep, torch.zeros(keep.shape).masked_fill(~keep, float("-inf"))
mean, others = v.mean(2), [0, 1, 3]
expected = [Attention()(q, k, v, mask) for mask in masks]
print(f"result PyTorch: bool {word(expected[0][:, :, 2], mean)}, float {word(expected[1][:, :, 2], mean)}")
for name, dynamo, opset in (("newer", True, 18), ("newer", True, 23), ("older", False, 18)):
    words = []
    for mask, right in zip(masks, expected):
        path, inputs = os.environ["FOLDER"] + "/model.onnx", (q, k, v, mask)
        torch.onnx.export(Attention(), inputs, path, input_names=NAMES, opset_version=opset, dynamo=dynamo)
        feed = {n: t.numpy() for n, t in zip(NAMES, inputs)}
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        out = [torch.from_numpy(run(None, feed)[0]) for run in (session.run, ReferenceEvaluator(path).run)]
        assert all(torch.allclose(o[:, :, others], right[:, :, others], atol=1e-5) for o in out)
        found = {word(o[:, :, 2], mean) for o in out}
        words.append(found.pop() if len(found) == 1 else "runtimes differ")
    print(f"result {name} exporter, opset {opset}: bool {words[0]}, float {words[1]}")
PY
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 onnx==1.23.2 onnxscript==0.7.2 \
    onnxruntime==1.32.0
seen=$(FOLDER="$folder" "$folder/venv/bin/python" "$folder/rows.py" 2> /dev/null | sed -n 's/^result //p')
echo "$seen"
expected='PyTorch: bool zeros, float zeros
newer exporter, opset 18: bool mean, float NaN
newer exporter, opset 23: bool zeros, float zeros
older exporter, opset 18: bool zeros, float NaN'
[[ $seen == "$expected" ]]
