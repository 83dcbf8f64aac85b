#!/usr/bin/env bash
# OpenVINO converts scaled_dot_product_attention: what does a query get whose keys are all masked?
#
# Versions: openvino 2026.4.1, torch 2.13.0 (Python 3.11 to 3.13, CPU).
# Guess: what PyTorch gives, zeros, for a bool mask and for a mask of -inf alike.
# Behaviour: NaN for both. The other rows are right.
# Why it matters: a padded batch with one empty sentence, or an exported decoder with left padding, gives NaN in the
#   runtime alone; a check in PyTorch does not see it.
# Output seen:
#   torch: bool 0 NaN, float 0 NaN; openvino: bool 8 NaN, float 8 NaN; other rows equal
# The script fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/rows.py" <<'PY'
import openvino
import torch


class Attention(torch.nn.Module):
    def forward(self, q, k, v, mask):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)


torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 1, 2, 8)
keep = torch.tensor([[[[True, True], [False, False]]]])
added = torch.zeros(keep.shape).masked_fill(~keep, float("-inf"))
counts, equal = {"torch": [], "openvino": []}, True
for mask in (keep, added):
    example = q, k, v, mask
    expected = Attention()(*example)
    model = openvino.convert_model(Attention(), example_input=example)
    compiled = openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    out = torch.from_numpy(compiled([t.numpy() for t in example])[0].copy())
    counts["torch"].append(int(expected.isnan().sum()))
    counts["openvino"].append(int(out.isnan().sum()))
    equal = equal and torch.allclose(out[..., 0, :], expected[..., 0, :], atol=1e-5)
text = "; ".join(f"{name}: bool {n[0]} NaN, float {n[1]} NaN" for name, n in counts.items())
print(f"{text}; other rows {'equal' if equal else 'differ'}")
PY
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 openvino==2026.4.1
seen=$("$folder/venv/bin/python" "$folder/rows.py" 2> /dev/null | grep "other rows")
echo "$seen"
[[ $seen == "torch: bool 0 NaN, float 0 NaN; openvino: bool 8 NaN, float 8 NaN; other rows equal" ]]
