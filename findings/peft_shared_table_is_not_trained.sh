#!/usr/bin/env bash
# peft adapts `shared`, the table of T5, BART and Marian, by LoRA or by modules_to_save: is the table trained?
#
# Versions: peft 0.21.2, transformers 4.57.6 and 5.23.0, torch 2.13.0 (Python 3.11 and 3.13, CPU).
# Guess: with ensure_weight_tying=True, which is made for tied tables, yes. Without it a warning says that the table is tied.
# Behaviour: it is not, with the flag and without. peft replaces the attribute `shared` of the model, and encoder and decoder
#   call `embed_tokens` of their own, which is another module or another name of the former one. Without the flag nothing
#   warns; with it a warning says that nothing tied was found. modules_to_save=["embed_tokens"] trains a table for the encoder
#   and one for the decoder. LoRA of it does so with transformers 5.23; with 4.57 it does for BART alone, where this is a
#   module of its own. The flag with modules_to_save=["embed_tokens"] raises.
# Why it matters: new words are added and their rows trained by modules_to_save=["shared"]. The parameters are counted as
#   trainable and are saved, and no gradient ever reaches them: the new words stay random.
# Output seen, for T5, BART and Marian: whether each table that is named gets a gradient
#   4.57.6 LoRA, shared: no, no, no; silent
#   4.57.6 modules_to_save, shared: no, no, no; silent
#   4.57.6 modules_to_save, shared, flag: no, no, no; warns
#   4.57.6 LoRA, embed_tokens: no table, yes, no table; warns
#   4.57.6 modules_to_save, embed_tokens: yes, yes, yes; warns
#   5.23.0 LoRA, shared: no, no, no; silent
#   5.23.0 modules_to_save, shared: no, no, no; silent
#   5.23.0 modules_to_save, shared, flag: no, no, no; warns
#   5.23.0 LoRA, embed_tokens: yes, yes, yes; warns
#   5.23.0 modules_to_save, embed_tokens: yes, yes, yes; warns
# The script fails if any changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/tables.py" <<'PY'
import warnings

import torch
import transformers as hf
from peft import LoraConfig, get_peft_model

hf.logging.set_verbosity_error()
PARTS = dict(vocab_size=32, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32, decoder_ffn_dim=32,
             encoder_attention_heads=2, decoder_attention_heads=2, pad_token_id=1, decoder_start_token_id=1)
T5 = dict(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
MODELS = [(hf.T5ForConditionalGeneration, T5, "q"), (hf.BartForConditionalGeneration, PARTS, "q_proj"),
          (hf.MarianMTModel, PARTS, "q_proj")]
IDS = torch.arange(3, 9)[None]
SETTINGS = {
    "LoRA, shared": lambda q: dict(target_modules=[q, "shared"]),
    "modules_to_save, shared": lambda q: dict(target_modules=[q], modules_to_save=["shared"]),
    "modules_to_save, shared, flag": lambda q: dict(target_modules=[q], modules_to_save=["shared"], ensure_weight_tying=True),
    "LoRA, embed_tokens": lambda q: dict(target_modules=[q, "embed_tokens"]),
    "modules_to_save, embed_tokens": lambda q: dict(target_modules=[q], modules_to_save=["embed_tokens"]),
}
for name, setting in SETTINGS.items():
    found, warned = [], []
    for kind, sizes, q in MODELS:
        model = kind(kind.config_class(**sizes))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model = get_peft_model(model, LoraConfig(**setting(q), init_lora_weights=False)).train()
            model(input_ids=IDS, labels=IDS).loss.backward()
        table = [p.grad is not None for key, p in model.named_parameters()
                 if p.requires_grad and (".shared." in key or ".embed_tokens." in key)]
        found.append("yes" if table and all(table) else "no" if table else "no table")
        warned.append(any("tied" in str(w.message) or "tying" in str(w.message) for w in seen))
    print(f"{hf.__version__} {name}: {', '.join(found)}; {'warns' if all(warned) else 'silent' if not any(warned) else warned}")
PY
python3 -m venv "$folder/venv"
for version in 4.57.6 5.23.0; do
    "$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 "transformers==$version" peft==0.21.2
    "$folder/venv/bin/python" "$folder/tables.py" 2> /dev/null
done > "$folder/seen"
cat "$folder/seen"
expected=$(sed -n '/^# Output seen/,/^# The script/p' "$0" | sed '1d;$d;s/^#   //')
[[ $(< "$folder/seen") == "$expected" ]]
