"""Tiny models of transformers with large random weights, built from the field names of their configs."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, PAD = 48, 0
LAYERS, HEADS, HEAD_DIM = 2, 4, 8
WIDTH = HEADS * HEAD_DIM
BATCH, LENGTH, WRITTEN = 3, 7, 5
IMAGE, PATCH = 32, 8


def _all(size: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), size)


# Names of the sizes in the configs of models.
SIZES: dict[str, Any] = (
    _all(VOCABULARY, "vocab_size text_vocab_size vocab_size_per_layer_input audio_vocab_size src_vocab_size "
                     "tgt_vocab_size")
    | _all(LAYERS, "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers "
                   "num_decoder_layers depth encoder_num_hidden_layers")
    | _all(HEADS, "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads "
                  "num_encoder_attention_heads num_decoder_attention_heads encoder_num_attention_heads")
    | _all(2, "num_key_value_heads num_kv_heads n_head_kv multi_query_group_num")
    | _all(WIDTH, "hidden_size d_model n_embd dim embed_dim embedding_size emb_dim word_embed_proj_dim projection_dim "
                  "encoder_hidden_size dim_model output_proj_size")
    | _all(40, "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner ffn_hidden_size hidden_dim "
               "moe_intermediate_size shared_expert_intermediate_size dim_ff intermediate_dim")
    | _all(HEAD_DIM, "head_dim d_kv qk_head_dim v_head_dim global_head_dim attention_head_dim attention_head_size")
    | _all(64, "max_position_embeddings n_positions max_source_positions max_target_positions n_ctx max_seq_len")
    | _all(4, "num_local_experts num_experts n_routed_experts moe_num_experts qk_rope_head_dim qk_nope_head_dim "
              "attention_window block_size")
    | _all(2, "num_experts_per_tok num_experts_per_token moe_topk moe_k")
    | _all(1, "n_group topk_group first_k_dense_replace")
    | _all(16, "q_lora_rank kv_lora_rank")
    | _all(None, "forced_eos_token_id forced_bos_token_id")
    | {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2,
       "cls_token_id": 1, "unk_token_id": 3, "sliding_window": 3, "image_size": IMAGE, "patch_size": PATCH}
)  # fmt: skip
DROPOUTS = ("dropout", "pdrop", "layerdrop", "drop_rate", "drop_path_rate", "drop_prob", "dropout_prob", "dropout_rate")
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16}
STAGES = {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "window_size": 2, "patch_size": 4}
PYRAMID = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 16, 16], "num_attention_heads": [2, 2, 2, 2]}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"n_group": 1, "topk_group": 1, "num_experts": 4},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "convnext": {"patch_size": 2},
    "data2vec-vision": {"num_hidden_layers": 4, "out_indices": [0, 1, 2, 3]},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 0},
    "dots1": {"n_shared_experts": 1},
    "esmc": {"num_key_value_heads": HEADS},
    "falcon_h1": {"mamba_d_ssm": WIDTH, "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_chunk_size": 8},
    "gemma3n_text": {"num_kv_shared_layers": 0, "laurel_rank": 4, "hidden_size_per_layer_input": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 3},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": MAMBA | HYBRID,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "kimi_linear": {"num_experts": 4, "n_routed_experts": 4, "linear_num_heads": 2, "linear_head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"expert_ffn_hidden_size": 24, "zero_expert_num": 2, "head_dim": 4},
    "luke": {"entity_vocab_size": 20, "entity_emb_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 16, "chunk_size": 8},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "neomme": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
    "nllb-moe": {"encoder_sparse_step": 1, "decoder_sparse_step": 1},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "chunk_size": 8},
    "perceiver": {"d_latents": WIDTH, "num_latents": 8, "num_self_attends_per_block": 2},
    "pvt_v2": PYRAMID,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 8]},
    "roc_bert": {"pronunciation_vocab_size": VOCABULARY, "shape_vocab_size": VOCABULARY},
    "segformer": PYRAMID,
    "speech_to_text": {"conv_channels": 16, "input_feat_per_channel": 16, "max_source_positions": 64},
    "swin": STAGES,
    "swinv2": STAGES,
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2, "depths": [1] * 7},
    "whisper": {"num_mel_bins": 16, "max_source_positions": 32},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4,
              "attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * HEAD_DIM, "num_key_value_heads": HEADS},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "num_key_value_heads": HEADS},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip

# Models that the sweep leaves out, with the reason. Each is still tried: one that can be made must leave this list.
NOT_MADE = {
    "BltForCausalLM": "its patches are made by a second model",
    "Gemma3nForConditionalGeneration": "needs the package timm",
    "Gemma4AssistantForCausalLM": "reads the cache of the model that it assists",
    "Gemma4UnifiedAssistantForCausalLM": "reads the cache of the model that it assists",
    "Nemotron3_5TranscribeForConditionalGeneration": "needs audio, and a head whose sizes follow from it",
    "Qwen4ExpForCausalLM": "its defaults leave the sizes of its experts open",
    "VoxtralRealtimeForConditionalGeneration": "needs audio beside each token",
    "xLSTMForCausalLM": "its tiny sizes do not fit its own kernels; it has no attention",
}


@dataclass(frozen=True)
class Case:
    """A class of transformers and its kind."""

    kind: str
    name: str
    parts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "+".join((self.name, *self.parts))


LANGUAGE = {"causal": "CAUSAL_LM", "masked": "MASKED_LM", "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM"}
OTHERS = {
    "image": "ViT DeiT Beit Swin Siglip CLIP Dinov2 Dinov2WithRegisters ViTMSN IJepa Data2VecVision Segformer Swinv2 "
             "PvtV2 ConvNext",
    "speech": "Wav2Vec2 Hubert UniSpeech UniSpeechSat Data2VecAudio Wav2Vec2Conformer WavLM",
    "transcription": "Whisper Speech2Text",
    "image and text": "CLIPModel SiglipModel",
}  # fmt: skip
COMPOSITES = [
    Case("image to text", "VisionEncoderDecoderModel", ("ViT", "GPT2")),
    Case("image to text", "VisionEncoderDecoderModel", ("ViT", "TrOCR")),
    Case("image to text", "VisionEncoderDecoderModel", ("Swinv2", "Bert")),
    Case("speech to text", "SpeechEncoderDecoderModel", ("Wav2Vec2", "Bert")),
    Case("speech to text", "SpeechEncoderDecoderModel", ("WavLM", "Bert")),
    Case("text to text", "EncoderDecoderModel", ("Bert", "BertGeneration")),
    Case("text to text", "EncoderDecoderModel", ("Bert", "XGLM")),
    Case("text to text", "EncoderDecoderModel", ("MegatronBert", "Bert")),
]
_ENDINGS = {
    "image": "ForImageClassification", "speech": "ForCTC", "transcription": "ForConditionalGeneration",
    "image and text": "",
}  # fmt: skip


@functools.cache
def language_models() -> list[Case]:
    """Return every class that the installed transformers lists for the three kinds of language model."""
    names = importlib.import_module("transformers.models.auto.modeling_auto")
    cases: dict[Case, None] = {}
    for kind, mapping in LANGUAGE.items():
        for name in getattr(names, f"MODEL_FOR_{mapping}_MAPPING_NAMES").values():
            if name != "EncoderDecoderModel":  # one of the composites
                cases[Case(kind, name if isinstance(name, str) else name[0])] = None
    return list(cases)


@functools.cache
def other_models() -> list[Case]:
    """Return vision, audio and combined models."""
    single = [Case(kind, name + _ENDINGS[kind]) for kind, names in OTHERS.items() for name in names.split()]
    return single + COMPOSITES


def model_class(case: Case) -> type:
    import transformers

    return getattr(transformers, case.name)


def named(name: str, *parts: str) -> Case:
    """Return the case of a class of transformers, whose kind follows from its name."""
    if parts:
        return Case("text to text", name, parts)
    if name.startswith(("Whisper", "Speech2Text")):
        return Case("transcription", name)
    kinds = {"MaskedLM": "masked", "LMHeadModel": "causal", "ForCausalLM": "causal", "ImageClassification": "image"}
    return Case(next((kind for ending, kind in kinds.items() if name.endswith(ending)), "seq2seq"), name)


def make(case: Case, implementation: str | None = None, **settings: Any) -> nn.Module:
    """Make a tiny model of a case, in evaluation mode, with the weights of seed 0.

    Args:
        implementation: of attention; None for the one that the model chooses.
        settings: fields of the config with values of their own.
    """
    torch.manual_seed(0)
    return model_class(case)(config_of(case, implementation, **settings)).eval()


def config_of(case: Case, implementation: str | None = None, **settings: Any) -> Any:
    """Return the config of a tiny model, as `make` uses it."""
    import transformers

    config_class = model_class(case).config_class
    if case.parts:
        encoder, decoder = (getattr(transformers, f"{part}Config") for part in case.parts)
        decoder = decoder(**tiny_settings(decoder), is_decoder=True, add_cross_attention=True)
        config = config_class(encoder=encoder(**tiny_settings(encoder)).to_dict(), decoder=decoder.to_dict())
        config.decoder_start_token_id, config.pad_token_id = 1, PAD
    else:
        config = config_class(**tiny_settings(config_class) | settings)
    if case.kind == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    if implementation is not None:
        config._attn_implementation = implementation
    config._experts_implementation = "eager"  # other implementations have no fp64
    return config


def tiny_settings(config_class: type) -> dict[str, Any]:
    """Return config fields that make a model tiny, with one layer of each of its types."""
    default = config_class()
    fields = vars(default)
    settings = {
        name: size for name, size in SIZES.items() if name in fields and not isinstance(fields[name], list | tuple)
    }
    for name, value in fields.items():
        if isinstance(value, float) and name.endswith(DROPOUTS):
            settings[name] = 0.0
    if isinstance(types := fields.get("layer_types"), list) and len(distinct := list(dict.fromkeys(types))) > 1:
        settings |= {"layer_types": distinct, "num_hidden_layers": len(distinct)}
    if "qk_nope_head_dim" in fields:  # latent attention: its head_dim follows from the others
        settings.pop("head_dim", None)
        settings["num_key_value_heads"] = HEADS
    for key in getattr(config_class, "sub_configs", {}):
        part = getattr(default, key, None)
        if part is not None:
            settings[key] = type(part)(**tiny_settings(type(part)))
    return settings | OVERRIDES.get(getattr(config_class, "model_type", ""), {})


@torch.no_grad()
def enlarge(model: nn.Module) -> None:
    """Multiply the weights, so that results depend clearly on the visible keys."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))


@torch.no_grad()
def scattered(model: nn.Module, std: float = 0.1) -> nn.Module:
    """Add noise to all parameters, so that norms have an effect and weights are not too small."""
    for parameter in model.parameters():
        if parameter.requires_grad:  # parameters without a gradient are computed, not saved
            parameter.add_(std * torch.randn_like(parameter))
    return model


def typed(given: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Convert tensors that are neither ids nor masks."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in given.items()}


def outcome(model: nn.Module, given: dict[str, Tensor], *, gradients: bool = True) -> dict[str, Tensor]:
    """Return the logits, and the gradients of a weighted mean of the logits at tokens, by name.

    Gradients come from ``backward``: a reentrant checkpoint knows no other way.
    """
    logits = (model(**given, use_cache=False) if "input_ids" in given else model(**given)).logits
    found = {"logits": logits}
    if gradients:
        weights = torch.linspace(-1, 2, logits.numel(), dtype=torch.float64).view_as(logits).to(logits.dtype)
        if "decoder_input_ids" not in given and "attention_mask" in given:
            weights = weights * given["attention_mask"].unsqueeze(-1)
        model.zero_grad(set_to_none=True)
        (logits * weights).mean().backward()
        found |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found


def inputs(case: Case, side: str, seed: int = 2) -> dict[str, Tensor]:
    """Return the inputs of a case's model, padded on a side ("left", "right") or not at all ("none").

    Returns:
        ids (3, 7) int64, images (3, 3, 32, 32), waves (3, 1200) or spectra (3, bins, frames) float32, the mask of
        the padding (1 = kept) where there is any, and ids (3, 5) for a decoder.
    """
    generator = torch.Generator().manual_seed(seed)
    given: dict[str, Tensor] = {}
    takes, writes = _TAKES[case.kind]
    if "ids" in takes:
        given["input_ids"] = _ids(LENGTH, generator)
    if "image" in takes:
        given["pixel_values"] = torch.randn(BATCH, 3, IMAGE, IMAGE, generator=generator)
    if "sound" in takes:
        spectrum = case.kind == "transcription"
        frames = (BATCH, 16, 64) if case.name.startswith("Whisper") else (BATCH, 64, 16)
        name, shape = ("input_features", frames) if spectrum else ("input_values", (BATCH, 1200))
        given[name] = torch.randn(shape, generator=generator)
    if side != "none" and "image" not in takes:
        lengths, kept = (1200, (1200, 800, 560)) if "sound" in takes else (LENGTH, (LENGTH, LENGTH - 3, 2))
        lengths, kept = (64, (64, 40, 24)) if case.kind == "transcription" else (lengths, kept)
        places, kept = torch.arange(lengths), torch.tensor(kept).unsqueeze(1)
        mask = places < kept if side == "right" else places >= lengths - kept
        given["attention_mask"] = mask.long()
        if "input_ids" in given:
            given["input_ids"] = given["input_ids"].masked_fill(~mask, PAD)
    if writes:
        given["decoder_input_ids"] = _ids(WRITTEN, generator)
    return given


_TAKES = {
    "causal": ("ids", False), "masked": ("ids", False), "seq2seq": ("ids", True), "image": ("image", False),
    "speech": ("sound", False), "transcription": ("sound", True), "image and text": ("ids image", False),
    "image to text": ("image", True), "speech to text": ("sound", True), "text to text": ("ids", True),
}  # fmt: skip


def _ids(length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(4, VOCABULARY - 4, (BATCH, length), generator=generator)
