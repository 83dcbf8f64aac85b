"""Commands on finished runs, and the search options that a run keeps from its recipe."""

import dataclasses
import json
import warnings

import pytest
from small_training import TINY, Messages, flags_of

from transformer_fast import GenerationConfig
from transformer_fast.translation import load_trained, train
from transformer_fast.translation.numbers import numbers_config
from transformer_fast.translation.progress import Silent
from transformer_fast.translation.translator import Translator


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({}, "raise max_steps, which is 20, to train on"),
        ({"max_time": 1e-3, "max_steps": 30}, "raise max_time, which is 0:00, to train on"),
        ({"cooldown": 5}, "train another run, with more max_steps, in another folder"),
    ],
)
def test_a_finished_run_says_so(numbers, tmp_path, changes, advice):
    config = numbers_config(numbers / "data", tmp_path / "run", **TINY | {"cooldown": 0} | changes)
    if "max_time" in changes:
        train(dataclasses.replace(config, max_time=None, max_steps=20), first := Messages())
    else:
        train(config, first := Messages())
    assert not any("is finished" in text for text in first.texts)
    train(config, again := Messages())
    said = again.texts[-1]
    assert said.startswith(f"the run in {tmp_path / 'run'} is finished at step 20: nothing was trained")
    assert f"Its result is in {tmp_path / 'run' / 'step-00000020'}" in said and said.endswith(advice)


def test_a_run_out_of_patience_says_so(numbers, tmp_path):
    options = {"max_steps": 30, "valid_every": 1, "patience": 1, "lr": 1e-30}
    config = numbers_config(numbers / "data", tmp_path / "run", **TINY | options)
    assert train(config, Silent()).stopped == "patience"
    train(config, again := Messages())
    assert again.texts[-1].endswith("raise patience, which is 1, to train on (0: no limit)")


RECIPE = """
[training]
vocab_size = 60
max_steps = 2
[translation]
beam = 2
length_penalty = 1.0
length_norm = "power"
max_length = [1, 5]
"""


def test_translate_takes_what_the_recipe_of_its_run_says(numbers, monkeypatch, command, tmp_path):
    recipe, save = tmp_path / "mine.toml", tmp_path / "run"
    recipe.write_text(RECIPE)

    flags = flags_of({name: value for name, value in TINY.items() if name not in ("max_steps", "vocab_size")})
    data, said = numbers / "data", b"seven\n\none hundred one\n"
    training = ["train", "--source", data / "train.en", "--target", data / "train.de", "--save", save, *flags]
    assert command(*training, "--recipe", recipe)[0] == 0
    kept = GenerationConfig(beam=2, length_penalty=1.0, length_norm="power", max_length=(1, 5))
    assert load_trained(save).generation == kept
    made = []
    real = Translator.__init__
    monkeypatch.setattr(Translator, "__init__", lambda s, *a, **k: made.append(k["config"]) or real(s, *a, **k))
    translated = ["translate", "--model", save]
    for flags, changed in (([], {}), (["--beam", "3", "--length-norm", "gnmt"], {"beam": 3, "length_norm": "gnmt"})):
        assert command(*translated, *flags, data=said)[0] == 0
        assert made[-1] == dataclasses.replace(kept, **changed, keep_weights=True)
    # Without --recipe the run keeps its settings of generation; another recipe replaces them.
    assert command(*training, "--max-steps=3", "--vocab-size=60")[0] == 0
    assert load_trained(save).generation == kept
    recipe.write_text(RECIPE.replace("beam = 2", "beam = 4"))
    assert command(*training, "--recipe", recipe, "--max-steps=3")[0] == 0
    assert load_trained(save).generation == dataclasses.replace(kept, beam=4)
    saved = json.loads((save / "config.json").read_text())
    former = {**saved["translation"], "coverage_penalty": 0.0, "beam_groups": 1, "diversity": 0.7, "draft_tokens": 4}
    (save / "config.json").write_text(json.dumps({**saved, "translation": former}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_trained(save).generation == dataclasses.replace(kept, beam=4)
    (save / "config.json").write_text(json.dumps({**saved, "translation": {**former, "coverage_penalty": 0.2}}))
    with pytest.warns(UserWarning, match="saved with coverage_penalty 0.2, which is no option any more"):
        assert load_trained(save).generation == dataclasses.replace(kept, beam=4)
    (save / "config.json").write_text(json.dumps({**saved, "translation": {"beem": 3}}))
    code, _, err = command(*translated, data=said)
    assert code == 2 and "config.json does not hold options of translation: beem: no such option" in err
