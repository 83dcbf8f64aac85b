#!/usr/bin/env bash
# torch.compiler.is_exporting(): is it False inside torch.compile?
#
# Versions: torch 2.11.0, 2.13.0, 2.14.1 (Python 3.11 and 3.12, CPU).
# Guess: False inside torch.compile and True inside torch.export, in each version.
# Behaviour: with torch 2.11 it is True inside torch.compile, too: the tracer answers with True whenever it meets the call.
#   From 2.13 on it is as guessed.
# Why it matters: code that leaves its fused operators out of exported programs leaves them out of every compiled model of
#   torch 2.11, and nothing says so.
# Output seen:
#   torch 2.11.0: compiled exporting, exported exporting
#   torch 2.13.0: compiled not exporting, exported exporting
#   torch 2.14.1: compiled not exporting, exported exporting
# The script fails if any changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/asks.py" <<'PY'
import torch


class Asks(torch.nn.Module):
    def forward(self, x):
        return x + torch.compiler.is_exporting()


def word(module):
    return "exporting" if module(torch.zeros(3))[0] else "not exporting"


x = torch.zeros(3)
compiled = word(torch.compile(Asks(), backend="eager", fullgraph=True))
exported = {word(torch.export.export(Asks(), (x,), strict=strict).module()) for strict in (True, False)}
assert word(Asks()) == "not exporting" and len(exported) == 1
print(f"torch {torch.__version__.split('+')[0]}: compiled {compiled}, exported {exported.pop()}")
PY
seen=""
for version in 2.11.0 2.13.0 2.14.1; do
    python3 -m venv --clear "$folder/venv"
    "$folder/venv/bin/pip" install -q --disable-pip-version-check "torch==$version"
    seen+=$("$folder/venv/bin/python" "$folder/asks.py" 2> /dev/null)$'\n'
done
printf %s "$seen"
expected='torch 2.11.0: compiled exporting, exported exporting
torch 2.13.0: compiled not exporting, exported exporting
torch 2.14.1: compiled not exporting, exported exporting
'
[[ $seen == "$expected" ]]
