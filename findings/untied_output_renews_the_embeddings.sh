#!/usr/bin/env bash
# The output layer of an encoder-decoder model is untied from its embeddings: are the embeddings still those stored?
#
# Versions: transformers 5.23.0, torch 2.13.0 (Python 3.11 to 3.13, CPU).
# Guess: yes. tie_word_embeddings=False is about the output layer, which is new where the checkpoint has none. A model
#   that was untied after loading, and then saved, comes back as it was.
# Behaviour: the flag parts encoder and decoder from the shared table, too. A checkpoint of a tied model holds that
#   table alone, so both get new random embeddings. A BART or Marian model that is untied by hand still has one table
#   for all three, which is saved once: after loading, encoder and decoder have random embeddings again. T5 comes back.
# Why it matters: saving and loading loses trained embeddings. The keys that are missing are logged, among them that of
#   the new output layer, which is expected in the first case.
# Output seen, loaded with the flag; untied by hand, saved, loaded:
#   Marian: encoder new, decoder new, output new; encoder new, decoder new, output kept
#   Bart: encoder new, decoder new, output new; encoder new, decoder new, output kept
#   T5: encoder new, decoder new, output new; encoder kept, decoder kept, output kept
# The script fails if any changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/untie.py" <<'PY'
import os

import torch
import transformers

transformers.logging.set_verbosity_error()
PATH = os.environ["FOLDER"] + "/checkpoint"
SIZES = dict(vocab_size=32, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32, decoder_ffn_dim=32,
             encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=16)


def compare(model, before):
    words = []
    for name, part in (("encoder", model.get_encoder()), ("decoder", model.get_decoder()), ("output", None)):
        weight = part.get_input_embeddings().weight if part is not None else model.get_output_embeddings().weight
        words.append(f"{name} {'kept' if torch.equal(weight, before[name]) else 'new'}")
    return ", ".join(words)


for kind, model in (
    ("Marian", transformers.MarianMTModel(transformers.MarianConfig(pad_token_id=31, **SIZES))),
    ("Bart", transformers.BartForConditionalGeneration(transformers.BartConfig(**SIZES))),
    ("T5", transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2))),
):
    shared = model.get_input_embeddings().weight.detach().clone()
    model.save_pretrained(PATH)
    tables = dict(encoder=shared, decoder=shared, output=shared)
    flagged = compare(type(model).from_pretrained(PATH, tie_word_embeddings=False), tables)
    model = type(model).from_pretrained(PATH)
    assert compare(model, tables) == "encoder kept, decoder kept, output kept"
    tables["output"] = shared + 1
    model.get_output_embeddings().weight = torch.nn.Parameter(tables["output"].clone())
    model.config.tie_word_embeddings = False
    model.save_pretrained(PATH)
    print(f"{kind}: {flagged}; {compare(type(model).from_pretrained(PATH), tables)}")
PY
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0
seen=$(FOLDER="$folder" "$folder/venv/bin/python" "$folder/untie.py" 2> /dev/null)
echo "$seen"
expected='Marian: encoder new, decoder new, output new; encoder new, decoder new, output kept
Bart: encoder new, decoder new, output new; encoder new, decoder new, output kept
T5: encoder new, decoder new, output new; encoder kept, decoder kept, output kept'
[[ $seen == "$expected" ]]
