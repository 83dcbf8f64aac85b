#!/usr/bin/env bash
# A tied table (embedding and output layer) exported to ONNX and quantised: how often is it stored, and what multiplies?
#
# Versions: torch 2.13.0, onnx 1.23.2, onnxscript 0.7.2, onnxruntime 1.32.0 (Python 3.11 to 3.13, CPU).
# Guess: both exporters store it once; after quantize_dynamic both graphs multiply int8 numbers.
# Behaviour: the newer exporter stores it once, and transposes it in the graph. The older one stores it twice, once
#   transposed. quantize_dynamic finds no constant behind the newer graph's Transpose. It stores the table in int8, and
#   DequantizeLinear makes floats of it in each run, before a MatMul of floats. The older graph gets MatMulInteger.
#   quant_pre_process before quantize_dynamic folds the transpose, at the price of the second copy.
# Why it matters: the file is small, and nothing warns; the speed of int8 is missing. One core, 256 tokens, table 8,000 x 256
#   (AMD EPYC): float32 34 to 38 ms; int8 of the newer graph 19 to 23 ms, of the older one 3.3 to 3.5 ms.
# Output seen (copies: size of the file by that of a float32 table):
#   newer: 1.00 copies, int8 0.25, DequantizeLinear MatMul; with quant_pre_process 0.50, MatMulInteger
#   older: 2.00 copies, int8 0.50, MatMulInteger; with quant_pre_process 0.50, MatMulInteger
# The script fails if any changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/tied.py" <<'PY'
import os

import onnx
import torch
from onnxruntime.quantization import quantize_dynamic
from onnxruntime.quantization.shape_inference import quant_pre_process

V, D, FOLDER = 20000, 64, os.environ["FOLDER"]


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = torch.nn.Embedding(V, D), torch.nn.Linear(D, V, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids):
        return self.out(self.table(ids))


def copies(path):
    return sum(os.path.getsize(p) for p in (path, path + ".data") if os.path.exists(p)) / (4 * V * D)


def int8(path):
    """Return the size of the quantised file, and its operators that multiply or make floats of int8."""
    quantize_dynamic(path, path + ".int8")
    names = {node.op_type for node in onnx.load(path + ".int8").graph.node}
    kept = sorted(names & {"DequantizeLinear", "MatMul", "MatMulInteger"})
    return f"{copies(path + '.int8'):.2f}, {' '.join(kept)}"


for name, dynamo in (("newer", True), ("older", False)):
    path = f"{FOLDER}/{name}.onnx"
    torch.onnx.export(Tied().eval(), (torch.zeros(2, 3, dtype=torch.long),), path, dynamo=dynamo, input_names=["ids"])
    quant_pre_process(path, path + ".folded")
    print(f"result {name}: {copies(path):.2f} copies, int8 {int8(path)}; with quant_pre_process {int8(path + '.folded')}")
PY
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 onnx==1.23.2 onnxscript==0.7.2 \
    onnxruntime==1.32.0 sympy==1.14.0
seen=$(FOLDER="$folder" "$folder/venv/bin/python" "$folder/tied.py" 2> /dev/null | sed -n 's/^result //p')
echo "$seen"
expected=$(sed -n '/^# Output seen/,/^# The script/p' "$0" | sed '1d;$d;s/^#   //')
[[ $seen == "$expected" ]]
