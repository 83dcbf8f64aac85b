#!/usr/bin/env bash
# T5 and Marian with a decoder_attention_mask that is 0 at padding: does position 0 of the decoder see later tokens?
#
# Versions: transformers 5.23.0, torch 2.13.0 (Python 3.11 to 3.13, CPU).
# Guess: no model does in any implementation of the attention: the decoder is causal with a mask and without.
# Behaviour: the decoder's start token of T5 and of Marian is the padding token, so (decoder_input_ids != pad) masks it.
#   Nothing is left for position 0 to attend to. T5, and Marian with the eager attention, then weigh all positions
#   alike, later ones too: their masks are the least finite number, for past and future. Marian with sdpa gets zeros.
#   Other positions stay causal, but miss the start token. BART starts with another token.
# Why it matters: the first word of the target is learned from the whole target, and generation, which has no such mask,
#   computes another function. The loss in training is too good, and the first word wrong.
# Output seen:
#   T5 eager: with the mask yes, without no
#   T5 sdpa: with the mask yes, without no
#   Marian eager: with the mask yes, without no
#   Marian sdpa: with the mask no, without no
#   Bart eager: with the mask no, without no
#   Bart sdpa: with the mask no, without no
# The script fails if any changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/first.py" <<'PY'
import torch
from transformers import (
    BartConfig, BartForConditionalGeneration, MarianConfig, MarianMTModel, T5Config, T5ForConditionalGeneration,
)

SIZES = dict(vocab_size=32, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32, decoder_ffn_dim=32,
             encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=16, init_std=0.3)


def make(kind, attention):
    torch.manual_seed(0)
    chosen = dict(attn_implementation=attention)
    if kind == "T5":
        parts = dict(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
        config = T5Config(pad_token_id=0, decoder_start_token_id=0, **parts, **chosen)
        return T5ForConditionalGeneration(config).eval()
    if kind == "Marian":
        return MarianMTModel(MarianConfig(pad_token_id=31, decoder_start_token_id=31, **SIZES, **chosen)).eval()
    return BartForConditionalGeneration(BartConfig(pad_token_id=1, decoder_start_token_id=2, **SIZES, **chosen)).eval()


for kind in ("T5", "Marian", "Bart"):
    for attention in ("eager", "sdpa"):
        model, logits = make(kind, attention), {}
        pad, start = model.config.pad_token_id, model.config.decoder_start_token_id
        for masked in (True, False):
            for end in ([7, 8, 9], [10, 11, 12]):
                ids = torch.tensor([[start, 5, 6, *end]])
                mask = (ids != pad).long() if masked else None
                with torch.no_grad():
                    out = model(input_ids=torch.tensor([[3, 4, 5]]), decoder_input_ids=ids, decoder_attention_mask=mask)
                logits.setdefault(masked, []).append(out.logits[0])
            assert torch.allclose(logits[masked][0][1:3], logits[masked][1][1:3], atol=1e-4)
        sees = ["no" if torch.allclose(a[0], b[0], atol=1e-3) else "yes" for a, b in logits.values()]
        print(f"{kind} {attention}: with the mask {sees[0]}, without {sees[1]}")
PY
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0
seen=$("$folder/venv/bin/python" "$folder/first.py" 2> /dev/null)
echo "$seen"
expected='T5 eager: with the mask yes, without no
T5 sdpa: with the mask yes, without no
Marian eager: with the mask yes, without no
Marian sdpa: with the mask no, without no
Bart eager: with the mask no, without no
Bart sdpa: with the mask no, without no'
[[ $seen == "$expected" ]]
