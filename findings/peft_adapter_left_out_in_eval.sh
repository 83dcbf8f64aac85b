#!/usr/bin/env bash
# LoRA adapters of peft in torch.nn.TransformerEncoder: does eval mode compute what training computed, without dropout?
#
# Versions: peft 0.21.2, torch 2.13.0 (Python 3.11 to 3.13, CPU).
# Guess: yes. peft replaces the layers by its own, and a module's forward is what runs.
# Behaviour: in eval mode TransformerEncoderLayer hands the weights of its parts to one fused operator, and calls none
#   of them. An adapter's layer has an attribute `weight`, that of the layer under it, so the operator takes the model
#   without adapters. An adapter of the attention's output projection is left out in training too, since
#   MultiheadAttention reads its weight; merged, it then changes a model that was trained without it.
#   torch.backends.mha.set_fastpath_enabled(False) mends the first two, and so does merging.
# Why it matters: validation and deployment score the base model, with gradients enabled or not, and nothing warns.
# Output seen:
#   linear1, linear2: training differs from the base, eval is the base, eval without the fast path is training
#   self_attn: training differs from the base, eval is the base, eval without the fast path is training
#   out_proj: training is the base, eval is the base, merged differs from the base
# The script fails if any changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/modes.py" <<'PY'
import copy

import torch
from peft import LoraConfig, get_peft_model


def run(model, x, fused=True):
    torch.backends.mha.set_fastpath_enabled(fused)
    with torch.no_grad():
        return model(x)


def same(a, b, yes, no):
    return yes if torch.allclose(a, b, atol=1e-4) else no


for names in (["linear1", "linear2"], ["self_attn"], ["out_proj"]):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model, x = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(4, 12, 64)
    base = run(copy.deepcopy(model).eval(), x, fused=False)
    # Not the zeros of a new adapter, but as after some steps.
    model = get_peft_model(model, LoraConfig(target_modules=names, init_lora_weights=False))
    trained, evaluated = run(model.train(), x), run(model.eval(), x)
    text = [same(trained, base, "training is the base", "training differs from the base")]
    text.append(same(evaluated, base, "eval is the base", "eval differs from the base"))
    if names == ["out_proj"]:
        text.append("merged " + same(run(model.merge_and_unload(), x), base, "is the base", "differs from the base"))
    else:
        unfused = same(run(model, x, fused=False), trained, "is training", "differs from training")
        text.append(f"eval without the fast path {unfused}")
    print(f"{', '.join(names)}: {', '.join(text)}")
PY
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 peft==0.21.2
seen=$("$folder/venv/bin/python" "$folder/modes.py" 2> /dev/null)
echo "$seen"
expected='linear1, linear2: training differs from the base, eval is the base, eval without the fast path is training
self_attn: training differs from the base, eval is the base, eval without the fast path is training
out_proj: training is the base, eval is the base, merged differs from the base'
[[ $seen == "$expected" ]]
