#!/usr/bin/env bash
# scaled_dot_product_attention on a CPU: which calls does the fused kernel take, and which does nothing take?
#
# Versions: torch 2.11.0, 2.13.0, 2.14.1 (Python 3.11 and 3.12, x86-64).
# Guess: the same calls in each version. The kernel takes tensors of four axes with heads that match, or with enable_gqa; a
#   mask and is_causal go together; no queries or no keys go to the plain computation.
# Behaviour: a mask with is_causal=True is joined by the kernel up to 2.13. With 2.14 nothing takes it, as the documentation
#   always said: the call raises. Three axes, and one head of keys without enable_gqa, go to the kernel from 2.14 on. In
#   2.11 the kernel refuses calls without queries or keys; from 2.13 on it takes them, but they are never handed to it.
# Why it matters: a model that passes both a padding mask and is_causal=True works with 2.13 on a CPU alone, and stops with
#   2.14. Code that leaves is_causal away because the mask has it works everywhere.
# Output seen; "plain" calls work in the default setting, and the fused kernel refuses them; all other calls that the script
# makes (dtypes, masks of each shape, a mask's gradient, dropout, grouped heads, scales, strides) are equal in all three:
#   torch 2.11.0: mask and is_causal fused; three axes plain; one head of keys plain; no keys plain
#   torch 2.13.0: mask and is_causal fused; three axes plain; one head of keys plain; no keys fused if asked
#   torch 2.14.1: mask and is_causal refused; three axes fused; one head of keys fused; no keys fused if asked
#   equal in all: float64, bfloat16, float16, bool mask (L, L), bool mask (B, 1, 1, L), float mask, float mask (L, 1),
#   float32 mask of bfloat16, causal, causal of 2 and 6, gradient, scale, negative scale, grouped, strided heads fused; mask
#   of three axes, mask with a gradient, dropout, wider values, five axes, k and v of batch 1, strided width plain; bfloat16
#   mask of float32 refused
# The script fails if any changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/calls.py" <<'PY'
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

torch.manual_seed(0)
KEEP, ZEROS = torch.ones(6, 6, dtype=torch.bool).tril(), torch.zeros(6, 6)


def t(*shape, dtype=torch.float32):
    return torch.randn(*(shape or (2, 4, 6, 8)), dtype=dtype)


def call(q=None, k=None, v=None, dtype=torch.float32, **options):
    return [t(dtype=dtype) if a is None else a for a in (q, k, v)], options


CHANGED = {
    "mask and is_causal": call(attn_mask=KEEP, is_causal=True),
    "three axes": call(t(4, 6, 8), t(4, 6, 8), t(4, 6, 8)),
    "one head of keys": call(k=t(2, 1, 6, 8), v=t(2, 1, 6, 8)),
    "no keys": call(k=t(2, 4, 0, 8), v=t(2, 4, 0, 8)),
}
EQUAL = {
    "float64": call(dtype=torch.float64),
    "bfloat16": call(dtype=torch.bfloat16),
    "float16": call(dtype=torch.float16),
    "bool mask (L, L)": call(attn_mask=KEEP),
    "bool mask (B, 1, 1, L)": call(attn_mask=torch.ones(2, 1, 1, 6, dtype=torch.bool)),
    "float mask": call(attn_mask=ZEROS),
    "float mask (L, 1)": call(attn_mask=torch.zeros(6, 1)),
    "float32 mask of bfloat16": call(dtype=torch.bfloat16, attn_mask=ZEROS),
    "causal": call(is_causal=True),
    "causal of 2 and 6": call(t(2, 4, 2, 8), is_causal=True),
    "gradient": call(t().requires_grad_()),
    "scale": call(scale=0.5),
    "negative scale": call(scale=-1.0),
    "grouped": call(k=t(2, 2, 6, 8), v=t(2, 2, 6, 8), enable_gqa=True),
    "strided heads": call(t(2, 6, 4, 8).transpose(1, 2)),
    "mask of three axes": call(attn_mask=torch.zeros(4, 6, 6)),
    "mask with a gradient": call(attn_mask=torch.zeros(6, 6, requires_grad=True)),
    "dropout": call(dropout_p=0.5),
    "wider values": call(v=t(2, 4, 6, 16)),
    "five axes": call(t(1, 2, 4, 6, 8), t(1, 2, 4, 6, 8), t(1, 2, 4, 6, 8)),
    "k and v of batch 1": call(k=t(1, 4, 6, 8), v=t(1, 4, 6, 8)),
    "strided width": call(t(2, 4, 8, 6).transpose(2, 3)),
    "bfloat16 mask of float32": call(attn_mask=ZEROS.bfloat16()),
}


def works(call, *backends):
    inputs, options = call
    try:
        if backends:
            with sdpa_kernel(list(backends)):
                sdpa(*inputs, **options)
        else:
            sdpa(*inputs, **options)
    except RuntimeError:
        return False
    return True


def word(call):
    inputs, options = call
    if not works(call):
        return "refused"
    chosen = torch._fused_sdp_choice(
        *inputs, options.get("attn_mask"), options.get("dropout_p", 0.0), options.get("is_causal", False),
        scale=options.get("scale"), enable_gqa=options.get("enable_gqa", False),
    )
    asked = works(call, SDPBackend.FLASH_ATTENTION)
    return "plain" if not asked else "fused" if chosen == SDPBackend.FLASH_ATTENTION.value else "fused if asked"


if sys.argv[1] == "changed":
    words = "; ".join(f"{name} {word(call)}" for name, call in CHANGED.items())
    print(f"torch {torch.__version__.split('+')[0]}: {words}")
else:
    groups = {}
    for name, call in EQUAL.items():
        groups.setdefault(word(call), []).append(name)
    print("; ".join(f"{', '.join(names)} {word}" for word, names in groups.items()))
PY
seen="" equal=""
for version in 2.11.0 2.13.0 2.14.1; do
    python3 -m venv --clear "$folder/venv"
    "$folder/venv/bin/pip" install -q --disable-pip-version-check "torch==$version" numpy==2.4.6
    seen+=$("$folder/venv/bin/python" "$folder/calls.py" changed 2> /dev/null)$'\n'
    equal+=$("$folder/venv/bin/python" "$folder/calls.py" equal 2> /dev/null)$'\n'
done
seen+="equal in all: $(sort -u <<< "${equal%$'\n'}")"
echo "$seen"
expected='torch 2.11.0: mask and is_causal fused; three axes plain; one head of keys plain; no keys plain
torch 2.13.0: mask and is_causal fused; three axes plain; one head of keys plain; no keys fused if asked
torch 2.14.1: mask and is_causal refused; three axes fused; one head of keys fused; no keys fused if asked
equal in all: float64, bfloat16, float16, bool mask (L, L), bool mask (B, 1, 1, L), float mask, float mask (L, 1), float32 mask of bfloat16, causal, causal of 2 and 6, gradient, scale, negative scale, grouped, strided heads fused; mask of three axes, mask with a gradient, dropout, wider values, five axes, k and v of batch 1, strided width plain; bfloat16 mask of float32 refused'
[[ $seen == "$expected" ]]
