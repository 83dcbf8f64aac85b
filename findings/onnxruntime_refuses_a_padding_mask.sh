#!/usr/bin/env bash
# A padding mask (B, 1, 1, L), one row for all queries, exported at opset 23 or 24: does onnxruntime run it?
#
# Versions: torch 2.13.0, onnx 1.23.2, onnxscript 0.7.2, onnxruntime 1.32.0 (Python 3.11 to 3.13, CPU).
# Guess: yes. The ONNX operator Attention takes a mask that broadcasts to (B, H, Lq, L).
# Behaviour: the session loads, and the first run raises: the mask's dimension of queries must be Lq, it may not be 1.
#   onnx.reference runs the same file and equals PyTorch. Below opset 23, where softmax is an operator of its own,
#   onnxruntime does too. mask.expand(-1, -1, Lq, -1) before the attention mends it.
# Why it matters: this is the mask of most encoders, and that of nn.TransformerEncoderLayer with src_key_padding_mask,
#   which fails likewise.
# Output seen:
#   opset 18: onnxruntime equal, reference equal
#   opset 23: onnxruntime raises, reference equal
#   opset 24: onnxruntime raises, reference equal
#   opset 23, expanded: onnxruntime equal, reference equal
#   opset 23, nn.TransformerEncoderLayer: onnxruntime raises, reference equal
# The script fails if any changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/masks.py" <<'PY'
import os

import onnxruntime
import torch
from onnx.reference import ReferenceEvaluator

LENGTHS = torch.tensor([5, 8])


class Attention(torch.nn.Module):
    def __init__(self, expanded=False):
        super().__init__()
        self.expanded = expanded

    def forward(self, x, keep):
        mask = keep[:, None, None]
        if self.expanded:
            mask = mask.expand(-1, -1, x.shape[1], -1)
        x = x.unflatten(-1, (2, 8)).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, mask).transpose(1, 2).flatten(2)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, x, keep):
        return self.layer(x, src_key_padding_mask=~keep)


def compare(model, opset):
    model, path = model.eval(), os.environ["FOLDER"] + "/model.onnx"
    x, keep = torch.randn(2, 8, 16), torch.arange(8) < LENGTHS[:, None]
    with torch.no_grad():
        expected = model(x, keep)
        torch.onnx.export(model, (x, keep), path, input_names=["x", "keep"], opset_version=opset, dynamo=True)
    feed, words = {"x": x.numpy(), "keep": keep.numpy()}, []
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for run in (session.run, ReferenceEvaluator(path).run):
        try:
            out = torch.from_numpy(run(None, feed)[0])
            words.append("equal" if torch.allclose(out[keep], expected[keep], atol=1e-5) else "differs")
        except Exception as error:
            assert "inconsistent q_sequence_length" in str(error)
            words.append("raises")
    return f"onnxruntime {words[0]}, reference {words[1]}"


torch.manual_seed(0)
for opset in (18, 23, 24):
    print(f"result opset {opset}: {compare(Attention(), opset)}")
print("result opset 23, expanded:", compare(Attention(expanded=True), 23))
print("result opset 23, nn.TransformerEncoderLayer:", compare(Layer(), 23))
PY
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 onnx==1.23.2 onnxscript==0.7.2 \
    onnxruntime==1.32.0
seen=$(FOLDER="$folder" "$folder/venv/bin/python" "$folder/masks.py" 2> /dev/null | sed -n 's/^result //p')
echo "$seen"
expected='opset 18: onnxruntime equal, reference equal
opset 23: onnxruntime raises, reference equal
opset 24: onnxruntime raises, reference equal
opset 23, expanded: onnxruntime equal, reference equal
opset 23, nn.TransformerEncoderLayer: onnxruntime raises, reference equal'
[[ $seen == "$expected" ]]
