#!/usr/bin/env bash
# A training loop with an autocast region around its optimizer steps: does the next forward use the new weights?
#
# Versions: torch 2.13.0 (Python 3.11 to 3.13, CPU, bfloat16).
# Guess: yes. A region chooses the dtype of each operator, and Linear reads its weight whenever it runs.
# Behaviour: the bfloat16 copy of a weight that was made first is kept to the end of the outermost region, and nothing
#   sees that the weight was changed in place. Every step computes the loss and the gradient of the weights at the
#   region's start, even with a region of its own for each forward, and even if the outer one has enabled=False. The
#   same holds for weights of an average that load_state_dict copies in. torch.clear_autocast_cache() after each change,
#   or cache_enabled=False, mends it.
# Why it matters: the float32 weights move, all gradients are finite, and nothing is raised; only the loss stands still.
# Output seen, loss of the first and of the tenth step:
#   a region for each forward: 9.456 to 0.198
#   the same, the loop in a region: 9.456 to 9.456
#   the same, the loop in a disabled region: 9.456 to 9.456
#   the same, cache cleared after each step: 9.456 to 0.198
#   other weights loaded in a region: the old output
# The script fails if any changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/steps.py" <<'PY'
from contextlib import nullcontext

import torch
from torch.nn.functional import mse_loss


def region(enabled=True):
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


def train(outer, clear=False):
    torch.manual_seed(0)
    model, x = torch.nn.Linear(8, 1), torch.randn(64, 8)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    with outer:
        for _ in range(10):
            with region():
                loss = mse_loss(model(x).float(), x.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if clear:
                torch.clear_autocast_cache()
    return f"{losses[0]:.3f} to {losses[-1]:.3f}"


print("a region for each forward:", train(nullcontext()))
print("the same, the loop in a region:", train(region()))
print("the same, the loop in a disabled region:", train(region(enabled=False)))
print("the same, cache cleared after each step:", train(region(), clear=True))
model, x = torch.nn.Linear(4, 4, bias=False), torch.ones(1, 4)
with torch.no_grad(), region():
    before = model(x)
    model.load_state_dict({"weight": torch.zeros(4, 4)})
    after = model(x)
print("other weights loaded in a region:", "the old output" if torch.equal(before, after) else "the new output")
PY
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0
seen=$("$folder/venv/bin/python" "$folder/steps.py" 2> /dev/null)
echo "$seen"
expected='a region for each forward: 9.456 to 0.198
the same, the loop in a region: 9.456 to 9.456
the same, the loop in a disabled region: 9.456 to 9.456
the same, cache cleared after each step: 9.456 to 0.198
other weights loaded in a region: the old output'
[[ $seen == "$expected" ]]
