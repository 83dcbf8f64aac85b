"""Imported Marian folders: answers equal transformers' `generate` token by token, in the fused step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
import safetensors.torch
from marian_folders import BASE, TEXT, answers, load, write_marian

from transformer_fast.generation import Hypothesis, generate
from transformer_fast.generation.session import Session
from transformer_fast.translation import Trained, load_trained
from transformer_fast.translation.checkpoints import import_marian
from transformer_fast.translation.checkpoints.marian_search import READ, from_settings
from transformer_fast.translation.translator import Translator

PAD, FORCED, VARIED = 103, {"forced_eos_token_id": 0}, {"no_repeat_ngram_size": 2}
SEARCHES = {
    "greedy": {"max_length": 24, "bad_words_ids": [[PAD]]},
    "greedy, forced end": {"max_length": 12, **FORCED},
    "greedy, no repeats": {"max_length": 30, "no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
    "opus-mt": {"num_beams": 4, "max_length": 24, "bad_words_ids": [[PAD]], "renormalize_logits": True}
    | FORCED
    | VARIED,
    "beam, not renormalised": {"num_beams": 4, "max_length": 20, "bad_words_ids": [[PAD], [9]], **VARIED},
    "beam, cut off": {"num_beams": 6, "max_length": 9, "length_penalty": 0.5},
    "beam, early": {"num_beams": 3, "max_length": 24, "early_stopping": True, "num_return_sequences": 3, **VARIED},
    "beam, never early": {"num_beams": 3, "max_length": 20, "early_stopping": "never", "length_penalty": 2.0, **VARIED},
    "beam, short wanted": {"num_beams": 4, "max_length": 20, "length_penalty": -0.5, "min_length": 4},
    "beam, new tokens": {"num_beams": 2, "max_new_tokens": 15, "min_new_tokens": 3},
    "beam, nothing said": {"num_beams": 2},
}


def run_of(folder: Path, save: Path) -> Trained:
    import_marian(folder, save)
    return load_trained(save)


def search(trained: Trained, lines: list[str], **changes: object) -> list[Hypothesis]:
    """Return all hypotheses of a padded batch, with the run's search options."""
    sources = trained.tokenizer.encode_source(lines)
    width = max(map(len, sources))
    src = torch.tensor([ids + [trained.tokenizer.pad] * (width - len(ids)) for ids in sources])
    config = dataclasses.replace(trained.generation, **changes)
    marks = {"bos": trained.tokenizer.bos, "eos": trained.tokenizer.eos, "pad": trained.tokenizer.pad}
    return [one for found in generate(trained.model, src, config=config, **marks) for one in found]


@pytest.fixture(scope="module")
def opus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trained]:
    """A folder with the search options of OPUS-MT, and the imported run."""
    root = tmp_path_factory.mktemp("opus")
    folder = write_marian(root / "hf", generation=SEARCHES["opus-mt"])
    return folder, run_of(folder, root / "run")


@pytest.fixture
def fused_only(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a step outside of the fused one fail; return the rows of each call of one step or several."""
    calls: list[int] = []
    prepare = Session.prepare

    def called(self: Session, rows: int, *steps: int, **options: bool) -> object:
        session = prepare(self, rows, *steps, **options)
        assert session is not None, "the step needs the modules"
        calls.append(rows)
        return session

    monkeypatch.setattr(Session, "prepare", called)
    return calls


@pytest.mark.cover(1)
@pytest.mark.parametrize("activation", ["swish", "gelu", "relu"])
def test_tokens_are_those_of_transformers(activation: str, tmp_path: Path, fused_only: list[int]) -> None:
    """Every search on one model: only generation_config.json differs."""
    folder = write_marian(tmp_path / "hf", activation_function=activation, seed=1)
    path = folder / "generation_config.json"
    ids, lengths = {"decoder_start_token_id": PAD, "pad_token_id": PAD, "eos_token_id": 0}, set()
    for number, (name, settings) in enumerate(SEARCHES.items()):
        path.write_text(json.dumps(ids | settings))
        expected, texts = answers(folder, TEXT)
        trained = run_of(folder, tmp_path / f"run{number}")
        fused_only.clear()
        found = search(trained, TEXT)
        assert fused_only, name
        assert [one.tokens for one in found] == expected, name
        assert trained.tokenizer.decode([one.tokens for one in found]) == texts, name
        lengths |= {len(tokens) for tokens in expected}
    assert len(lengths) > 8, "the answers must end at different lengths"


def test_scores_are_those_of_transformers(opus: tuple[Path, Trained]) -> None:
    folder, trained = opus
    model, tokenizer = load(folder)
    asked = {"return_dict_in_generate": True, "output_scores": True, "num_return_sequences": 4}
    expected = model.generate(**tokenizer(TEXT, return_tensors="pt", padding=True), **asked).sequences_scores
    found = torch.tensor([one.score for one in search(trained, TEXT, n_best=4)])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.slow("a model of 50 million weights")
def test_the_base_size(tmp_path: Path, fused_only: list[int]) -> None:
    folder = write_marian(tmp_path / "hf", generation=SEARCHES["opus-mt"], **BASE)
    trained = run_of(folder, tmp_path / "run")
    for beam in (1, 4):
        expected, _ = answers(folder, TEXT[:3], num_beams=beam)
        assert [one.tokens for one in search(trained, TEXT[:3], beam=beam)] == expected
        assert fused_only and len(set(map(tuple, expected))) == 3


FORMS = {
    "unscaled embeddings": {"scale_embedding": False},
    "two vocabularies": {"share_encoder_decoder_embeddings": False},
    "two vocabularies, output of its own": {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
    "odd width": {"d_model": 33, "encoder_attention_heads": 3, "decoder_attention_heads": 3},
}


@pytest.mark.parametrize("form", FORMS)
def test_other_forms(form: str, tmp_path: Path, fused_only: list[int]) -> None:
    folder = write_marian(tmp_path / "hf", **FORMS[form])
    pads = {json.loads(path.read_text())["<pad>"] for path in folder.glob("*vocab.json")}
    settings = {"num_beams": 3, "max_length": 24, "num_return_sequences": 3} | FORCED | VARIED
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings | {"bad_words_ids": [[pad] for pad in pads]}))
    expected, texts = answers(folder, TEXT)
    trained = run_of(folder, tmp_path / "run")
    found = [one.tokens for one in search(trained, TEXT)]
    assert fused_only and found == expected and trained.tokenizer.decode(found) == texts


def test_with_and_without_a_cache(opus: tuple[Path, Trained]) -> None:
    found, slow = search(opus[1], TEXT), search(opus[1], TEXT, cache=False)
    assert [one.tokens for one in found] == [one.tokens for one in slow]


LINES = [*TEXT, "no such words: Zürich, 42!", "seven </s> nine <pad>", ">>deu<< seven", ">>xyz<< seven", "  a\tb  "]


def test_ids_are_those_of_the_tokenizer(opus: tuple[Path, Trained]) -> None:
    tokenizer, trained = load(opus[0])[1], opus[1]
    ours = trained.tokenizer.encode_source([*LINES, ""])
    assert ours == tokenizer([*LINES, ""])["input_ids"]
    assert trained.tokenizer.unk in ours[6] and ours[8][0] == 2 != trained.tokenizer.unk == ours[9][0]
    ids = list(range(len(trained.tokenizer)))
    assert trained.tokenizer.decode([ids[1:]]) == [tokenizer.decode(ids[1:], skip_special_tokens=True)]


def test_text_in_text_out(opus: tuple[Path, Trained]) -> None:
    """Translate text; lines of the output have single spaces."""
    folder, trained = opus
    _, texts = answers(folder, [line.strip() for line in LINES])
    translator = Translator(trained.model, trained.tokenizer, config=trained.generation)
    assert list(translator.translate(LINES)) == [" ".join(text.split()) for text in texts]
    assert any(texts)


def test_without_a_config_padding_is_no_word(tmp_path: Path) -> None:
    """In this model padding is the most likely token, as can happen in OPUS-MT."""
    folder = write_marian(tmp_path / "hf")
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["final_logits_bias"][0, PAD] = 99
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    trained = run_of(folder, tmp_path / "run")
    found = Translator(trained.model, trained.tokenizer, beam=2).decode_ids(TEXT)
    assert any(found) and not any(PAD in ids for ids in found)


def test_every_part_of_a_long_line_asks_for_its_language(opus: tuple[Path, Trained]) -> None:
    translator = Translator(opus[1].model, opus[1].tokenizer, longest=12)
    pieces = [part.text for _, part in translator._parts({0: ">>deu<< " + " ".join(TEXT)})[0]]
    assert len(pieces) > 2 and all(piece.startswith(">>deu<<") for piece in pieces)
    assert " ".join(piece.removeprefix(">>deu<<").strip() for piece in pieces) == " ".join(TEXT)


def test_the_commands(opus: tuple[Path, Trained], tmp_path: Path, command: Callable) -> None:
    """Run `import`, then `translate` with the folder's options and with flags."""
    folder, run = opus[0], tmp_path / "run"
    assert command("import", "--from", folder, "--save", run)[0] == 0

    def translate(*flags: str) -> list[str]:
        code, out, _ = command("translate", "--model", run, *flags, data="".join(f"{x}\n" for x in TEXT).encode())
        assert code == 0
        return out

    flags = {
        (): {},
        ("--beam", "1"): {"num_beams": 1},
        ("--beam", "2", "--length-penalty", "3"): {"num_beams": 2, "length_penalty": 3.0},
        ("--early-stop",): {"early_stopping": True},
        ("--max-length", "4"): {"max_length": 5},
    }
    for given, options in flags.items():
        assert translate(*given) == [" ".join(text.split()) for text in answers(folder, TEXT, **options)[1]], given
    assert len(translate("--slots", "close", "--n-best", "2")) == 2 * len(TEXT)
    assert len(translate("--sample", "--seed", "1")) == len(TEXT)


def test_a_run_that_an_earlier_version_imported(opus: tuple[Path, Trained], tmp_path: Path) -> None:
    """The config.json holds all options of that version."""
    import_marian(opus[0], tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    saved = json.loads(path.read_text())
    former = {"coverage_penalty": 0.0, "beam_groups": 1, "diversity": 0.5, "graph": False, "draft_tokens": 0}
    path.write_text(json.dumps({**saved, "generation": {**saved["generation"], **former}}))
    assert load_trained(tmp_path / "run").generation == opus[1].generation


def test_positions_past_the_table(tmp_path: Path) -> None:
    """transformers fails past the table; transformer_fast computes these positions, in the layout of the table."""
    folder = write_marian(tmp_path / "hf", max_position_embeddings=8, generation={"max_length": 30, "min_length": 20})
    wide = write_marian(tmp_path / "wide", max_position_embeddings=64, generation={"max_length": 30, "min_length": 20})
    expected, _ = answers(wide, TEXT)
    assert max(map(len, expected)) > 8
    assert [one.tokens for one in search(run_of(folder, tmp_path / "run"), TEXT)] == expected


def as_bin(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def as_old_bin(folder: Path) -> None:
    """Convert to the format of the first OPUS-MT models: 16 bits, every name of a shared matrix, and positions."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    for name in ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors["model.shared.weight"]
    model = load(folder)[0].model
    for side in ("encoder", "decoder"):
        tensors[f"model.{side}.embed_positions.weight"] = getattr(model, side).embed_positions.weight.data
    torch.save({name: tensor.half() for name, tensor in tensors.items()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def as_shards(folder: Path) -> None:
    load(folder)[0].save_pretrained(folder, max_shard_size="40KB")
    (folder / "model.safetensors").unlink()
    assert len(list(folder.glob("model-*.safetensors"))) > 1


@pytest.mark.parametrize("change", [as_bin, as_old_bin, as_shards], ids=lambda change: change.__name__)
def test_every_kind_of_weight_file(change, tmp_path: Path) -> None:
    folder = write_marian(tmp_path / "hf", generation=SEARCHES["greedy"])
    change(folder)
    expected, _ = answers(folder, TEXT)
    assert [one.tokens for one in search(run_of(folder, tmp_path / "run"), TEXT)] == expected


def test_without_a_generation_config(tmp_path: Path) -> None:
    """Old folders have the search options in config.json."""
    folder = write_marian(tmp_path / "hf")
    (folder / "generation_config.json").unlink()
    path = folder / "config.json"
    settings = {"num_beams": 3, "max_length": 17, "bad_words_ids": [[PAD]], "length_penalty": 0.7}
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    trained = run_of(folder, tmp_path / "run")
    assert (trained.generation.beam, trained.generation.force_eos, trained.generation.suppress) == (3, True, (PAD,))
    assert [one.tokens for one in search(trained, TEXT)] == answers(folder, TEXT)[0]


def test_null_is_a_default(tmp_path: Path) -> None:
    """Files that transformers wrote have null for settings that nobody gave."""
    assert from_settings(dict.fromkeys(READ), eos=0, vocabulary=9, where="") == from_settings(
        {}, eos=0, vocabulary=9, where=""
    )
    folder = write_marian(tmp_path / "hf")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": {"lstrip": False}, "pad_token": None}))
    assert run_of(folder, tmp_path / "run").tokenizer.pad == PAD
