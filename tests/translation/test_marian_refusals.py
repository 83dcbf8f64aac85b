"""Folders that are not Marian's, or incomplete: the error names the problem, and nothing is written."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import safetensors.torch
from marian_folders import write_marian
from small_training import full_disk

from transformer_fast import cli
from transformer_fast.translation import CheckpointError, TrainConfig, load_trained, train
from transformer_fast.translation.checkpoints import import_marian


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_marian(tmp_path_factory.mktemp("marian") / "hf")


def edit(name: str, **changes: Any) -> Callable[[Path], None]:
    """Change values of a json file; ... removes one."""

    def change(folder: Path) -> None:
        path = folder / name
        values = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))

    return change


def remove(*names: str) -> Callable[[Path], None]:
    """Remove files."""

    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def write(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = safetensors.torch.load_file(path)
        change(tensors)
        safetensors.torch.save_file(tensors, path, {"format": "pt"})

    return changed


def as_bin(content: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        torch.save(content, folder / "pytorch_model.bin")

    return change


class Code:
    """Object whose pickle creates a file when it is loaded."""

    def __reduce__(self) -> tuple[object, ...]:
        return Path("this-was-run").touch, ()


def with_code(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"model.shared.weight": Code()}))


def shard(**place: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "one.safetensors")
        names = safetensors.torch.load_file(folder / "one.safetensors")
        index = {"weight_map": {**dict.fromkeys(names, "one.safetensors"), **place}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


BIAS, LAYER = "final_logits_bias", "model.decoder.layers.1.fc1.weight"
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (remove("config.json"), r"has no config\.json; expected the folder of a Hugging Face Marian model"),
    "a config cut short": (write("config.json", b'{"model_type": "mar'), r"config\.json is damaged"),
    "a config that is a list": (write("config.json", b"[]"), r"config\.json holds a list; expected a json object"),
    "another model": (edit("config.json", model_type="bart"), "has model_type 'bart'; expected 'marian'"),
    "pre-norm": (edit("config.json", normalize_before=True), "normalize_before True; Marian has post-norm layers"),
    "activation": (edit("config.json", activation_function="tanh"), "'tanh'; expected relu, swish, silu, gelu"),
    "layers": (edit("config.json", encoder_layers="3"), "encoder_layers '3'; expected a whole number >= 1"),
    "heads": (edit("config.json", decoder_attention_heads=5), "d_model 32, which is no multiple of the heads"),
    "tied by half": (
        edit("config.json", tie_word_embeddings=False),
        "not with the output layer; expected tie_word_embeddings true",
    ),
    "no vocabulary": (remove("vocab.json"), r"has no vocab\.json; a Marian model needs source\.spm, target\.spm"),
    "no spm": (remove("source.spm", "target.spm"), r"has no source\.spm, target\.spm; a Marian model needs"),
    "no target vocabulary": (edit("tokenizer_config.json", separate_vocabs=True), r"has no target_vocab\.json"),
    "an spm of something else": (write("target.spm", b"text"), r"target\.spm is not a sentencepiece model"),
    "no end": (edit("vocab.json", **{"</s>": ...}), r"vocab\.json has no </s>; expected an id for each of"),
    "an id twice": (edit("vocab.json", seven=5), "gives the id 5 to two pieces"),
    "ids of text": (edit("vocab.json", seven="5"), "is not a map of pieces to ids"),
    "a bigger vocabulary": (edit("vocab.json", seven=500), "has ids up to 500, but the model of config.json has 104"),
    "a smaller vocabulary": (edit("config.json", vocab_size=200, decoder_vocab_size=200), "ids up to 103, but .* 200"),
    "another end": (edit("config.json", eos_token_id=3), "eos_token_id 3, but vocab.json gives </s> the id 0"),
    "a start outside": (edit("config.json", decoder_start_token_id=999), "decoder_start_token_id 999; expected an id"),
    "no weights": (remove("model.safetensors"), r"has no weights; expected one of model\.safetensors"),
    "weights cut short": (write("model.safetensors", b"\x10\0\0\0\0\0\0\0{"), r"model\.safetensors is damaged"),
    "a weight too few": (weights(lambda t: t.pop(LAYER)), f"the weights have no {LAYER}, which config.json needs"),
    "no embedding": (weights(lambda t: t.pop("model.shared.weight")), r"have no model\.shared\.weight"),
    "a weight too many": (
        weights(lambda t: t.update(more=t[BIAS] + 1)),
        "have 1 tensors that .* does not have, such as more",
    ),
    "a layer too many": (
        edit("config.json", decoder_layers=1),
        "have 26 tensors that .* does not have, such as model.decoder",
    ),
    "another shape": (
        weights(lambda t: t.update({LAYER: t[LAYER][1:]})),
        r"the shape \(55, 32\); config.json needs \(56, 32\)",
    ),
    "two of one matrix": (
        weights(lambda t: t.update({"lm_head.weight": t["model.shared.weight"] + 1})),
        r"lm_head\.weight and model\.shared\.weight differ; config\.json says that they are one matrix",
    ),
    "whole numbers": (weights(lambda t: t.update({BIAS: t[BIAS].int()})), r"final_logits_bias is torch\.int32"),
    "code": (with_code, r"pytorch_model\.bin holds Python objects .* it could run code, so it was not opened"),
    "a module": (as_bin(torch.nn.Linear(2, 2)), "holds Python objects beside its tensors"),
    "a list": (as_bin([torch.ones(2)]), "holds a list; expected tensors by name"),
    "a shard missing": (shard(more="two.safetensors"), "names the file two.safetensors, which is missing"),
    "a shard elsewhere": (shard(more="../one.safetensors"), "expected files of the same folder"),
    "an index with more": (shard(more="one.safetensors"), "more is in the index but in no file"),
    "groups of beams": (edit("generation_config.json", num_beam_groups=2), "num_beam_groups to 2: this option cannot"),
    "unknown, on": (edit("generation_config.json", remove_invalid_values=True), "remove_invalid_values to True"),
    "a bad phrase": (edit("generation_config.json", bad_words_ids=[[1, 2]]), "only words of one token are supported"),
    "a bad word outside": (edit("generation_config.json", bad_words_ids=[[104]]), "expected ids below 104"),
    "another forced end": (edit("generation_config.json", forced_eos_token_id=4), "expected none or that of eos, 0"),
    "another end to search for": (edit("generation_config.json", eos_token_id=4), "eos_token_id 4; config.json has 0"),
    "a beam of draws": (edit("generation_config.json", num_beams=2, do_sample=True), "sampling with a beam"),
    "a penalty with a beam": (
        edit("generation_config.json", num_beams=2, repetition_penalty=1.2),
        "repetition_penalty to 1.2: with a beam",
    ),
    "a beam of half": (edit("generation_config.json", num_beams=0.5), "beam must be an int >= 1, got 0.5"),
    "beams in words": (edit("generation_config.json", num_beams="four"), "has an invalid setting: "),
    "a bad word that is none": (edit("generation_config.json", bad_words_ids=[3]), "has an invalid setting: "),
    "early, perhaps": (edit("generation_config.json", early_stopping="maybe"), 'expected true, false or "never"'),
    "no probability": (
        edit("config.json", activation_dropout="0.1"),
        "activation_dropout '0.1'; expected a probability",
    ),
    "no length": (edit("generation_config.json", max_length=1), "max_length must be an int >= 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_folder_is_named_and_nothing_is_written(
    name: str, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, said = WRONG[name]
    shutil.copytree(good, tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    change(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=said):
        import_marian(tmp_path / "hf", tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_the_command_says_it_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["import", "--from", str(tmp_path / "no"), "--save", str(tmp_path / "run")]
    assert cli.main(flags) == 2
    assert capsys.readouterr().err.endswith("is not a folder; expected one with the config.json of a Marian model\n")


@pytest.mark.parametrize("kind", ["file", "empty", "run"])
def test_a_folder_that_is_there_is_left_alone(kind: str, good: Path, tmp_path: Path) -> None:
    save = tmp_path / "run"
    if kind == "file":
        save.write_text("mine")
    elif kind == "empty":
        save.mkdir()
    else:
        import_marian(good, save)
    before = sorted(path.stat().st_mtime_ns for path in (save, *save.rglob("*")))
    with pytest.raises(CheckpointError, match="run is there already; nothing was written"):
        import_marian(good, save)
    assert sorted(path.stat().st_mtime_ns for path in (save, *save.rglob("*"))) == before


def test_a_full_disk_leaves_nothing(good: Path, tmp_path: Path) -> None:
    says = r"cannot write to the folder .*run: No space left on device"
    with full_disk("vocab.json"), pytest.raises(CheckpointError, match=says):
        import_marian(good, tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["vocab.json", "source.spm", "step-00000000/model.safetensors"])
def test_a_run_that_was_altered_is_named(name: str, good: Path, tmp_path: Path) -> None:
    import_marian(good, tmp_path / "run")
    with open(tmp_path / "run" / name, "ab") as file:
        file.write(b" ")
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):
        load_trained(tmp_path / "run")


def test_training_does_not_go_on_there(good: Path, tmp_path: Path, corpus: dict[str, str]) -> None:
    import_marian(good, tmp_path / "run")
    with pytest.raises(CheckpointError, match="is an imported model; training cannot be continued there"):
        train(TrainConfig(**corpus, save=str(tmp_path / "run"), device="cpu"))
