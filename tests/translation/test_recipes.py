"""Named recipes: their settings, flags that override them, and errors of wrong ones."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from transformer_fast import GenerationConfig, cli
from transformer_fast.translation import ConfigError, TrainConfig, build_model, load_recipe, recipe_names
from transformer_fast.translation.commands.train import add_arguments, config_from_args

PLACE = ["--source", "a", "--target", "b", "--save", "c"]


def config(*flags: str) -> TrainConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return config_from_args(parser.parse_args([*PLACE, *flags]))


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_can_be_trained_and_decoded_with(name: str) -> None:
    recipe = load_recipe(name)
    settings = config("--recipe", name)
    assert {key: getattr(settings, key) for key in recipe.training} == recipe.training
    assert GenerationConfig(**recipe.translation).beam == recipe.translation["beam"]
    assert recipe.about.strip()


def test_the_tiny_recipe_is_the_published_one() -> None:
    tiny = config("--recipe", "multi30k-tiny")
    assert (tiny.layers, tiny.d_model, tiny.d_ff, tiny.heads, tiny.norm_first) == (4, 128, 256, 4, False)
    assert (tiny.dropout, tiny.tie_weights, tiny.vocab_size, tiny.label_smoothing) == (0.3, True, 10_000, 0.1)
    assert (tiny.lr, tiny.warmup, tiny.batch_tokens, tiny.max_steps) == (5e-3, 2000, 8192, 8000)
    assert (tiny.average_last, tiny.valid_every, tiny.lowercase) == (10, 0, True)
    assert load_recipe("multi30k-tiny").translation == {"beam": 5, "length_penalty": 1.0, "length_norm": "power"}
    model = build_model(tiny, 50)
    assert model.encoder.embed.lut.weight is model.decoder.embed.lut.weight is model.out.weight
    assert not list(model.encoder.norm.parameters())  # post-norm has no last norm
    layer = model.decoder.layers[3]
    assert (layer.dropout_3.p, layer.attn_1.dropout.p, layer.ff.dropout.p) == (0.3, 0.0, 0.0)


def test_the_base_recipe_is_the_papers() -> None:
    base = config("--recipe", "paper-base")
    assert (base.layers, base.d_model, base.heads, base.d_ff, base.norm_first) == (6, 512, 8, 2048, False)
    assert (base.dropout, base.label_smoothing, base.tie_weights, base.warmup) == (0.1, 0.1, True, 4000)
    assert (base.vocab_size, base.batch_tokens, base.max_steps, base.average_last) == (37_000, 25_000, 100_000, 5)
    assert base.lr == pytest.approx(512**-0.5 * 4000**-0.5)
    assert load_recipe("paper-base").translation == {"beam": 4, "length_penalty": 0.6, "length_norm": "gnmt"}


def test_flags_win_over_the_recipe_and_the_recipe_over_the_defaults() -> None:
    changed = config("--recipe", "multi30k-tiny", "--dropout", "0.1", "--norm-first", "--average-last", "0")
    assert (changed.dropout, changed.norm_first, changed.average_last) == (0.1, True, 0)
    assert (changed.lr, changed.clip) == (5e-3, 0.0)
    assert config() == TrainConfig(source="a", target="b", save="c")


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[training]\nd_model = 64\nsave = 'here'\n")
    assert (config("--recipe", str(path)).d_model, config("--recipe", str(path)).save) == (64, "c")
    path.write_text("[training]\nmax_time = '20m'\n")
    assert config("--recipe", str(path)).max_time == 1200


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read the recipe .*mine.toml: No such file"),
        ("d_model = ", "is not TOML"),
        ("[training]\nd_modle = 64\n", "sets d_modle, which training does not know"),
        ("[model]\nd_model = 64\n", r"may only hold about, \[training\] and \[translation\]; it also has \['model'\]"),
        ("[training]\nd_model = 'wide'\n", "d_model is 'wide'; expected a whole number"),
        ("[training]\nlr = 'fast'\n", "lr is 'fast'; expected a number"),
        ("[training]\nmax_time = 'soon'\n", "cannot read 'soon' as a duration"),
        ("training = 4\n", "training in the recipe .*mine.toml is 4; expected a table of settings"),
        ("[translation]\nbeem = 4\n", r"\[translation\] of the recipe .*mine.toml: beem: no such option"),
        ("[translation]\nbeam = 0\n", r"\[translation\] of the recipe .*mine.toml: beam must be an int >= 1, got 0"),
    ],
)
def test_wrong_recipes(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "mine.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=says):
        config("--recipe", str(path))


def test_the_command_lists_them_and_names_them_when_asked_for_another(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["train", "--list-recipes"])
    shown = capsys.readouterr().out
    assert left.value.code == 0 and all(f"{name}\n" in shown for name in recipe_names())
    assert "--no-norm-first" in shown and "--lr 0.005" in shown
    assert cli.main(["train", *PLACE, "--recipe", "multi30k"]) == 2
    assert "recipe is 'multi30k'; expected one of multi30k-tiny" in capsys.readouterr().err
