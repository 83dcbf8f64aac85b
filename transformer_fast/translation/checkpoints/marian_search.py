"""Conversion of search options between Hugging Face transformers and this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...generation import GenerationConfig
from ..errors import CheckpointError

DEFAULT_NEW_TOKENS = 20  # default maximum length in transformers
EARLY_STOP: dict[object, bool | str] = {False: "now", None: "now", True: True, "never": False}

# Settings that do not change results here: ids that are read elsewhere, return options, cache options, and sampling
# options, which matter only with do_sample.
NO_MATTER = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version"),
    *("_from_model_config", "_commit_hash", "use_cache", "cache_implementation", "cache_config", "return_legacy_cache"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_lookbehind", "target_lookbehind", "disable_compile", "compile_config"),
}
READ = {
    *("num_beams", "num_return_sequences", "length_penalty", "early_stopping", "max_length", "max_new_tokens"),
    *("min_length", "min_new_tokens", "no_repeat_ngram_size", "repetition_penalty", "bad_words_ids", "suppress_tokens"),
    *("forced_eos_token_id", "renormalize_logits", "do_sample", "temperature", "top_k", "top_p"),
}
REFUSED = {
    *("num_beam_groups", "diversity_penalty", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "min_p"),
    *("typical_p", "epsilon_cutoff", "eta_cutoff", "forced_bos_token_id", "begin_suppress_tokens", "guidance_scale"),
    *("exponential_decay_length_penalty", "sequence_bias", "stop_strings", "remove_invalid_values", "penalty_alpha"),
    *("constraints", "force_words_ids", "watermarking_config", "dola_layers", "max_time", "token_healing"),
}


def from_settings(settings: Mapping[str, Any], *, eos: int, vocabulary: int, where: str) -> GenerationConfig:
    """Convert the settings of a generation_config.json to ours.

    eos, vocabulary: end-of-sentence id and vocabulary size of the model. where: name of the file, for errors.

    Raises:
        CheckpointError: a setting that would change the results has no equivalent here, or is invalid.
    """
    try:
        return _from_settings({n: v for n, v in settings.items() if v is not None}, eos, vocabulary, where)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where} has an invalid setting: {error}") from None


def _from_settings(settings: dict[str, Any], eos: int, vocabulary: int, where: str) -> GenerationConfig:
    def refuse(name: str, reason: str) -> CheckpointError:
        return CheckpointError(f"{where} sets {name} to {settings[name]!r}: {reason}")

    for name, value in settings.items():
        if name not in READ | NO_MATTER and not _has_no_effect(value):
            raise refuse(name, "this option cannot be imported")
    beam, sample = settings.get("num_beams") or 1, bool(settings.get("do_sample"))
    penalty = float(settings.get("repetition_penalty") or 1.0)
    if beam > 1 and sample:
        raise refuse("do_sample", "sampling with a beam is not supported; expected num_beams 1")
    if beam > 1 and penalty != 1.0:
        raise refuse(
            "repetition_penalty",
            "with a beam transformers applies it to log-probabilities, transformer_fast to logits; expected 1",
        )
    if settings.get("forced_eos_token_id") not in (None, eos, [eos]):
        raise refuse("forced_eos_token_id", f"expected none or that of eos, {eos}")
    early_stop = settings.get("early_stopping")
    if early_stop not in EARLY_STOP:
        raise refuse("early_stopping", 'expected true, false or "never"')
    suppress: set[int] = set(settings.get("suppress_tokens") or ())
    for word in settings.get("bad_words_ids") or ():
        if len(word) != 1:
            raise refuse("bad_words_ids", "only words of one token are supported")
        suppress |= set(word)
    suppress -= {eos}  # transformers never forbids this token
    if any(not isinstance(token, int) or not 0 <= token < vocabulary for token in suppress):
        raise refuse("bad_words_ids", f"expected ids below {vocabulary}, the size of the vocabulary")
    # In transformers, max_length and min_length count the start token, so min_length counts EOS here.
    longest, least = settings.get("max_new_tokens") or DEFAULT_NEW_TOKENS, settings.get("min_length") or 0
    if settings.get("max_length") and not settings.get("max_new_tokens"):
        longest = settings["max_length"] - 1
    if settings.get("min_new_tokens"):
        least = settings["min_new_tokens"] + 1
    drawing = {
        "temperature": settings.get("temperature", 1.0),
        "top_k": settings.get("top_k", 50),
        "top_p": settings.get("top_p", 1.0),
    }
    return GenerationConfig(
        beam=beam,
        n_best=settings.get("num_return_sequences") or 1,
        length_penalty=settings.get("length_penalty", 1.0),
        length_norm="power",
        slots="keep",
        early_stop=EARLY_STOP[early_stop],
        max_length=longest,
        min_length=least,
        no_repeat_ngram=settings.get("no_repeat_ngram_size") or 0,
        repetition_penalty=penalty,
        suppress=tuple(sorted(suppress)),
        force_eos=settings.get("forced_eos_token_id") is not None,
        renormalize=bool(settings.get("renormalize_logits")),
        sample=sample,
        **(drawing if sample else {}),
    )


def to_settings(config: GenerationConfig, *, eos: int) -> dict[str, Any]:
    """The inverse of `from_settings`, for a config that it made or one like it."""
    assert config.slots == "keep" and config.length_norm == "power" and isinstance(config.max_length, int)
    settings: dict[str, Any] = {
        "num_beams": config.beam,
        "num_return_sequences": config.n_best,
        "length_penalty": config.length_penalty,
        "early_stopping": {"now": False, True: True, False: "never"}[config.early_stop],
        "max_length": config.max_length + 1,
        "min_length": config.min_length,
        "no_repeat_ngram_size": config.no_repeat_ngram,
        "repetition_penalty": config.repetition_penalty,
        "bad_words_ids": [[token] for token in config.suppress] or None,
        "forced_eos_token_id": eos if config.force_eos else None,
        "renormalize_logits": config.renormalize,
    }
    if config.sample:
        drawing = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
        settings |= {"do_sample": True, **drawing}
    return {name: value for name, value in settings.items() if value is not None}


def _has_no_effect(value: object) -> bool:
    """Return True if the value of an unknown setting has no effect, such as a penalty or group of 1."""
    return not value or (type(value) in (int, float) and value == 1)
