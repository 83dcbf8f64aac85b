#!/usr/bin/env bash
# DataCollatorWithFlattening of transformers, with sdpa or eager attention: do the sentences of a row stay apart?
#
# Versions: transformers 5.23.0, torch 2.13.0 (Python 3.11 to 3.13, CPU).
# Guess: for causal models yes, since they read the sentences from position_ids; for encoders no.
# Behaviour: for causal models only with use_cache=False. With the default of their configs a cache is made, in training
#   mode too, and a mask that has a cache looks at no position_ids. OPT never looks at them. Encoders (BERT, RoBERTa,
#   ModernBERT) make no such mask in any case. Nothing warns.
# Why it matters: the collator is made for padding-free training. A loop of one's own, or an evaluation, then computes
#   each sentence with its neighbours in view; the loss looks well. Trainer sets use_cache=False, which mends it for Llama,
#   and not for OPT or an encoder.
# Output seen, sdpa and eager alike, in training mode without dropout:
#   Llama: by default seen, use_cache=False apart
#   Qwen3: by default seen, use_cache=False apart
#   GPT2: by default seen, use_cache=False apart
#   OPT: by default seen, use_cache=False seen
#   Bert: seen
#   Roberta: seen
#   ModernBert: seen
# The script fails if any changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/rows.py" <<'PY'
import torch
import transformers as hf

hf.logging.set_verbosity_error()
SIZES = dict(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
WIDER = dict(SIZES, intermediate_size=32)
MARKS = dict(pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2)
OFF = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
MODELS = {
    "Llama": (hf.LlamaForCausalLM, dict(WIDER, num_key_value_heads=2)),
    "Qwen3": (hf.Qwen3ForCausalLM, dict(WIDER, num_key_value_heads=2, head_dim=8)),
    "GPT2": (hf.GPT2LMHeadModel, dict(vocab_size=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2, **OFF)),
    "OPT": (hf.OPTForCausalLM, dict(SIZES, ffn_dim=32, dropout=0.0)),
    "Bert": (hf.BertForMaskedLM, dict(WIDER, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)),
    "Roberta": (hf.RobertaForMaskedLM, dict(WIDER, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)),
    "ModernBert": (hf.ModernBertForMaskedLM, dict(WIDER, **MARKS)),
}
collate = hf.DataCollatorWithFlattening(return_tensors="pt")


@torch.no_grad()
def word(model, **options):
    """Change the first sentence: does the second change?"""
    rows = [collate([{"input_ids": first}, {"input_ids": [8, 9, 10, 11]}]) for first in ([5, 6, 7], [20, 21, 22])]
    one, other = (model(**row, **options).logits[:, 3:] for row in rows)
    return "apart" if torch.allclose(one, other, atol=1e-5) else "seen"


for name, (kind, sizes) in MODELS.items():
    words = []
    for attention in ("sdpa", "eager"):
        torch.manual_seed(0)
        model = kind(kind.config_class(**sizes, attn_implementation=attention)).train()
        if "CausalLM" in kind.__name__ or "LMHead" in kind.__name__:
            words.append(f"by default {word(model)}, use_cache=False {word(model, use_cache=False)}")
        else:
            words.append(word(model))
    print(f"{name}: {words[0] if words[0] == words[1] else words}")
PY
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0
seen=$("$folder/venv/bin/python" -W ignore "$folder/rows.py" 2> /dev/null)
echo "$seen"
expected='Llama: by default seen, use_cache=False apart
Qwen3: by default seen, use_cache=False apart
GPT2: by default seen, use_cache=False apart
OPT: by default seen, use_cache=False seen
Bert: seen
Roberta: seen
ModernBert: seen'
[[ $seen == "$expected" ]]
