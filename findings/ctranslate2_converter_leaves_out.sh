#!/usr/bin/env bash
# CTranslate2's converter of transformers' models: does it take each option of a config that changes the numbers?
#
# Versions: ctranslate2 4.8.5, transformers 5.23.0, torch 2.13.0 (Python 3.11 and 3.12, CPU, float32).
# Guess: it takes the activation, the epsilon of norms, the size of heads, biases and sliding windows, or it refuses them.
# Behaviour: log probabilities differ from transformers' for Llama, Mistral and Qwen2 with another hidden_act than SiLU, for
#   GPT-2 with another epsilon than 1e-5 (RMS norms take theirs from the config), for a head_dim that is not the width by the
#   heads, for biases of Gemma's attention, and for Qwen2's sliding window. Neither the converter nor the model says so.
# Why it matters: the converted model runs and writes words, of another model. Comparing one batch of log probabilities with
#   transformers shows it.
# Output seen:
#   GPT2: same; layer_norm_epsilon=0.3 differs; activation_function='relu' same
#   Llama: same; hidden_act='gelu' differs; head_dim=8 differs; rms_norm_eps=0.3 same; attention_bias=True same
#   Mistral: same; hidden_act='gelu' differs
#   Qwen2: same; hidden_act='gelu' differs; sliding_window=2 differs
#   Gemma: same; attention_bias=True differs; rms_norm_eps=0.3 same
#   messages: none
# The script fails if any changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/convert.py" <<'PY'
import contextlib
import io
import logging
import os
import tempfile
import warnings

import numpy as np
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
import ctranslate2
import tokenizers
import transformers as hf

hf.utils.logging.disable_progress_bar()
WORDS = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(4, 32))]
SPECIAL = dict(bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
MARKS = dict(vocab_size=32, bos_token_id=0, pad_token_id=1, eos_token_id=2)
SIZES = dict(MARKS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=2, max_position_embeddings=64)
WINDOW = dict(use_sliding_window=True, sliding_window=2, max_window_layers=0)
MODELS = {
    "GPT2": (hf.GPT2LMHeadModel, dict(MARKS, n_embd=32, n_layer=2, n_head=2, n_positions=64),
             [dict(layer_norm_epsilon=0.3), dict(activation_function="relu")]),
    "Llama": (hf.LlamaForCausalLM, SIZES, [dict(hidden_act="gelu"), dict(head_dim=8), dict(rms_norm_eps=0.3),
                                           dict(attention_bias=True)]),
    "Mistral": (hf.MistralForCausalLM, dict(SIZES, sliding_window=None), [dict(hidden_act="gelu")]),
    "Qwen2": (hf.Qwen2ForCausalLM, SIZES, [dict(hidden_act="gelu"), WINDOW]),
    "Gemma": (hf.GemmaForCausalLM, dict(SIZES, head_dim=16), [dict(attention_bias=True), dict(rms_norm_eps=0.3)]),
}
IDS = [0, 5, 9, 20, 7, 5, 30, 11]
said = io.StringIO()
logging.getLogger().addHandler(logging.StreamHandler(said))


@torch.no_grad()
def word(kind, config):
    torch.manual_seed(0)
    model = kind(kind.config_class(**config)).eval()
    for p in model.parameters():
        p.add_(torch.randn_like(p) * 0.4)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder + "/hf")
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
        hf.PreTrainedTokenizerFast(tokenizer_object=made, **SPECIAL).save_pretrained(folder + "/hf")
        with contextlib.redirect_stdout(said), warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            ctranslate2.converters.TransformersConverter(folder + "/hf").convert(folder + "/ct2")
        said.write("".join(str(w.message) for w in seen if "ctranslate2" in w.filename))
        generator = ctranslate2.Generator(folder + "/ct2", device="cpu", compute_type="float32", intra_threads=1)
        out = np.array(generator.forward_batch([[WORDS[i] for i in IDS]], return_log_probs=True))
    expected = model(torch.tensor([IDS])).logits.log_softmax(-1).numpy()
    gap = np.abs(out - expected).max()
    assert gap < 1e-4 or gap > 0.1, gap
    return "same" if gap < 1e-4 else "differs"


for name, (kind, sizes, options) in MODELS.items():
    words = [word(kind, sizes)]
    for option in options:
        key = "sliding_window" if option is WINDOW else next(iter(option))
        words.append(f"{key}={option[key]!r} {word(kind, {**sizes, **option})}")
    print(f"result {name}: {'; '.join(words)}")
print("result messages:", said.getvalue().strip() or "none")
PY
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0 ctranslate2==4.8.5 \
    setuptools==79.0.1
seen=$("$folder/venv/bin/python" "$folder/convert.py" 2> /dev/null | sed -n 's/^result //p')
echo "$seen"
expected=$(sed -n '/^# Output seen/,/^# The script/p' "$0" | sed '1d;$d;s/^#   //')
[[ $seen == "$expected" ]]
