#!/usr/bin/env bash
# Trainer of transformers and causal language models: is the loss of a step the mean over the predicted tokens?
#
# Versions: transformers 5.23.0, accelerate 1.15.0, torch 2.13.0 (Python 3.11 to 3.13, CPU).
# Guess: GPT-2 and Llama are both causal models with the same loss function, so both train on the loss that the model
#   returns when it is called by itself.
# Behaviour: Trainer divides the sum by the number of labels. It leaves the first label of a row out, which nothing
#   predicts, only if the name of the class says so. "LlamaForCausalLM" does; "GPT2LMHeadModel" does not, though its
#   loss is the same function. With rows of L tokens and no padding, loss and gradient of GPT-2 are (L - 1) / L of the
#   mean.
# Why it matters: the same data and learning rate train the two models by different steps, most of all on short rows.
# Output seen:
#   GPT2LMHeadModel: 0.8750 of its own loss
#   LlamaForCausalLM: 1.0000 of its own loss
# The script fails if either changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/step.py" <<'PY'
import os

import torch
import transformers

transformers.logging.set_verbosity_error()
LENGTH = 8


class OneStep(transformers.Trainer):
    def training_step(self, *args, **kwargs):
        self.loss = super().training_step(*args, **kwargs)
        return self.loss


sizes = dict(vocab_size=32, bos_token_id=0, eos_token_id=1)
none = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
gpt2 = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=LENGTH, **none, **sizes)
llama = transformers.LlamaConfig(
    hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, **sizes
)
for model in (transformers.GPT2LMHeadModel(gpt2), transformers.LlamaForCausalLM(llama)):
    ids = torch.randint(2, 32, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    alone = model(input_ids=ids, labels=ids).loss.item()
    arguments = transformers.TrainingArguments(
        os.environ["FOLDER"], max_steps=1, per_device_train_batch_size=2, learning_rate=0.0, use_cpu=True,
        report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no",
    )
    trainer = OneStep(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    trainer.train()
    print(f"{type(model).__name__}: {trainer.loss.item() / alone:.4f} of its own loss")
PY
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
seen=$(FOLDER="$folder/run" "$folder/venv/bin/python" "$folder/step.py" 2> /dev/null | grep "own loss")
echo "$seen"
[[ $seen == "GPT2LMHeadModel: 0.8750 of its own loss"$'\n'"LlamaForCausalLM: 1.0000 of its own loss" ]]
