#!/usr/bin/env bash
# Trainer of transformers with gradient_accumulation_steps=4: is the gradient of four equal batches that of one?
#
# Versions: transformers 5.23.0, accelerate 1.15.0, torch 2.13.0 (Python 3.11 to 3.13, CPU).
# Guess: yes for every model, since Trainer divides by the number of steps, or by the number of labels in all of them.
# Behaviour: the gradient of BART and of BERT's masked language model is 4 times too large, that of Llama is right. The
#   forward of all three takes **kwargs, so Trainer leaves the division to the loss. BART and BERT compute the loss
#   themselves and ignore the number of labels that Trainer passes.
# Why it matters: with accumulation over N steps these models train at N times the learning rate, clipped or not.
#   model.accepts_loss_kwargs = False mends it.
# Output seen:
#   BartForConditionalGeneration: 4.000 times, 1.000 with accepts_loss_kwargs = False
#   BertForMaskedLM: 4.000 times, 1.000 with accepts_loss_kwargs = False
#   LlamaForCausalLM: 1.000 times, 1.000 with accepts_loss_kwargs = False
# The script fails if any changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/step.py" <<'PY'
import copy
import os

import torch
import transformers
from transformers import BartConfig, BertConfig, LlamaConfig

transformers.logging.set_verbosity_error()
PARTS = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
BART = dict(d_model=16, encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_layers=1, decoder_layers=1)
IDS = torch.randint(3, 32, (2, 8), generator=torch.Generator().manual_seed(0))


def gradient(model, steps, accepts):
    model = copy.deepcopy(model).train()
    if accepts is not None:
        model.accepts_loss_kwargs = accepts
    arguments = transformers.TrainingArguments(
        os.environ["FOLDER"], max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=steps,
        max_grad_norm=0.0, optim="sgd", learning_rate=1e-3, lr_scheduler_type="constant", use_cpu=True, report_to=[],
        disable_tqdm=True, save_strategy="no", logging_strategy="no",
    )
    before = [p.detach().clone() for p in model.parameters()]
    rows = [{"input_ids": row, "labels": row} for row in IDS] * steps
    transformers.Trainer(model, arguments, train_dataset=rows).train()
    return torch.cat([(p.detach() - b).flatten() for p, b in zip(model.parameters(), before)]).norm()


for kind, config in (
    (transformers.BartForConditionalGeneration, BartConfig(vocab_size=32, encoder_attention_heads=2,
     decoder_attention_heads=2, dropout=0.0, pad_token_id=1, **BART)),
    (transformers.BertForMaskedLM, BertConfig(vocab_size=32, hidden_dropout_prob=0.0,
     attention_probs_dropout_prob=0.0, **PARTS)),
    (transformers.LlamaForCausalLM, LlamaConfig(vocab_size=32, num_key_value_heads=2, **PARTS)),
):
    torch.manual_seed(0)
    model = kind(config)
    ratios = [gradient(model, 4, accepts) / gradient(model, 1, accepts) for accepts in (None, False)]
    print(f"{kind.__name__}: {ratios[0]:.3f} times, {ratios[1]:.3f} with accepts_loss_kwargs = False")
PY
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
seen=$(FOLDER="$folder/run" "$folder/venv/bin/python" "$folder/step.py" 2> /dev/null | grep "times")
echo "$seen"
expected='BartForConditionalGeneration: 4.000 times, 1.000 with accepts_loss_kwargs = False
BertForMaskedLM: 4.000 times, 1.000 with accepts_loss_kwargs = False
LlamaForCausalLM: 1.000 times, 1.000 with accepts_loss_kwargs = False'
[[ $seen == "$expected" ]]
