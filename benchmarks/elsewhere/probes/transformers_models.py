"""Models of transformers: masks under two implementations, dropout, positions, the loss of Trainer, scores of beams."""

from __future__ import annotations

import logging
import os
import warnings
from importlib.metadata import version
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.simplefilter("ignore")
import numpy as np  # noqa: E402
import shared  # noqa: E402
import torch  # noqa: E402
import transformers as hf  # noqa: E402
from torch.nn.functional import log_softmax  # noqa: E402
from transformers import modeling_flash_attention_utils as flash  # noqa: E402
from transformers.modeling_outputs import MaskedLMOutput  # noqa: E402
from transformers.trainer_pt_utils import LabelSmoother  # noqa: E402

hf.logging.set_verbosity_error()
logging.disable(logging.WARNING)
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
NAMES = ("eager", "sdpa")


def bert(name: str, p: float = 0.0) -> Any:
    """Return a BERT with an implementation of attention, and dropout in attention alone."""
    torch.manual_seed(0)
    config = hf.BertConfig(**SIZES, attn_implementation=name, hidden_dropout_prob=0.0, attention_probs_dropout_prob=p)
    return hf.BertModel(config).eval()


def llama(name: str) -> Any:
    """Return a Llama."""
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=2, attn_implementation=name)).eval()


def of_both(what: Any) -> str:
    """Say it of both implementations, once if that is the same."""
    words = [what(name) for name in NAMES]
    return words[0] if words[0] == words[1] else "; ".join(f"{n}: {w}" for n, w in zip(NAMES, words))


@torch.no_grad()
def padding_alone() -> str:
    """Say what BERT's attention gives for a sentence of padding alone: its values are the inputs of its last part."""
    ids = torch.randint(3, 32, (2, 6), generator=torch.Generator().manual_seed(1))
    words = []
    for name in NAMES:
        model, seen = bert(name), []
        attention = model.encoder.layer[0].attention
        attention.self.value.register_forward_hook(lambda m, args, out, seen=seen: seen.append(out[1]))
        attention.output.dense.register_forward_pre_hook(lambda m, args, seen=seen: seen.append(args[0][1]))
        model(ids, attention_mask=torch.tensor([[1] * 6, [0] * 6]))
        values, out = (t.numpy() for t in seen[:2])
        answers = {"zeros": np.zeros_like(out), "the mean of all values": np.broadcast_to(values.mean(0), out.shape)}
        words.append(f"{name}: {shared.same(out, answers)}")
    return "; ".join(words)


@torch.no_grad()
def mask(model: Any, make: Any) -> str:
    """Say what a mask that blocks the last two positions does; "keeps": as a sentence without them."""
    ids = torch.randint(3, 32, (2, 6), generator=torch.Generator().manual_seed(1))
    try:
        out = model(ids, attention_mask=make(ids))[0][:, :4]
    except Exception as error:
        return f"refused ({type(error).__name__})"
    for word, other in ("keeps", model(ids[:, :4])[0]), ("is ignored", model(ids)[0][:, :4]):
        if torch.allclose(out, other, atol=1e-4):
            return word
    return "is added"


def masks(name: str) -> str:
    """Say what each kind of mask means for BERT."""
    model, keep = bert(name), torch.tensor([1, 1, 1, 1, 0, 0])

    def four(ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return keep.to(dtype).expand(len(ids), 1, 6, 6)

    kinds = {
        "(B, Lk) of 1 and 0": lambda ids: keep.expand(len(ids), -1),
        "(B, Lk) bool": lambda ids: keep.bool().expand(len(ids), -1),
        "(B, 1, Lq, Lk) bool": lambda ids: four(ids, torch.bool),
        "(B, 1, Lq, Lk) of 1 and 0 in float": lambda ids: four(ids, torch.float),
        "the same of 0 and finfo.min": lambda ids: (1 - four(ids, torch.float)) * torch.finfo(torch.float).min,
    }
    found: dict[str, list[str]] = {}
    for kind, make in kinds.items():
        word = mask(model, make)
        word = "keeps" if word == "keeps" and "finfo" not in kind else "blocks" if word == "keeps" else word
        found.setdefault(word, []).append(kind)
    return "; ".join(f"{', '.join(kinds)}: {word}" for word, kinds in found.items())


@torch.no_grad()
def cached(name: str) -> str:
    """Say how two new tokens of Llama see two cached ones."""
    model, ids = llama(name), torch.tensor([[3, 4, 5, 6]])
    cache = model(ids[:, :2], use_cache=True).past_key_values
    out = model(ids[:, 2:], past_key_values=cache).logits
    return "bottom right" if torch.allclose(out, model(ids).logits[:, 2:], atol=1e-4) else "not bottom right"


def dropped(name: str) -> str:
    """Say whether attention drops weights in training."""
    model, ids = bert(name, p=0.5).train(), torch.tensor([[3, 4, 5, 6]])
    first, second = model(ids)[0], model(ids)[0]
    return "ignored" if torch.equal(first, second) else "applied"


def flash_dropout() -> str:
    """Say what becomes of dropout with a kernel whose function has no such argument (FlashAttention-3 and -4)."""

    def kernel(q: Any, k: Any, v: Any, softmax_scale: Any = None, causal: bool = False) -> None: ...

    options = flash._lazy_define_process_function(kernel)(
        query_length=4, key_length=4, is_causal=False, dropout=0.5, softmax_scale=None
    )
    return "left out without a word" if "dropout_p" not in options else "passed on"


def flex_dropout() -> str:
    """Say what flex_attention does with dropout in training."""
    return dropped("flex_attention") if not isinstance(w := shared.tried(lambda: dropped("flex_attention")), str) else w


def smoothed(logits: np.ndarray, targets: np.ndarray) -> float:
    """Return the loss of Trainer's label smoothing."""
    output = MaskedLMOutput(logits=torch.from_numpy(logits))
    return float(LabelSmoother(0.1)(output, torch.from_numpy(targets)))


def bart(kind: type, **options: Any) -> Any:
    """Return a BART, or a Marian whose names of the options are BART's."""
    torch.manual_seed(0)
    return kind(kind.config_class(**shared.BART, **options)).eval()


@torch.no_grad()
def beam_score(model: Any, source: torch.Tensor) -> tuple[float, list[int]]:
    """Return the score of the best of four beams with length_penalty 1, and its words."""
    options = {"num_beams": 4, "max_new_tokens": 8, "length_penalty": 1.0, "early_stopping": True, "do_sample": False}
    out = model.generate(source, output_scores=True, return_dict_in_generate=True, **options)
    return float(out.sequences_scores[0]), out.sequences[0].tolist()


@torch.no_grad()
def divisor() -> str:
    """Say by what the sum of log probabilities is divided."""
    model = bart(
        hf.BartForConditionalGeneration,
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )
    source = torch.tensor([[4, 5, 6, 7, 2]])
    score, words = beam_score(model, source)
    ids = torch.tensor([words])
    logs = log_softmax(model(source, decoder_input_ids=ids[:, :-1]).logits, -1)
    total, new = float(logs.gather(2, ids[:, 1:, None]).sum()), len(words) - 1
    for word, count in (("the new tokens", new), ("all tokens, the start included", new + 1), ("1", 1)):
        if abs(score - total / count) < 1e-4:
            return f"sum of log probabilities by {word}, the end included" if count == new else f"sum by {word}"
    return "something else"


def first_position(kind: type, **options: Any) -> int:
    """Return the row of the table of positions that the first token reads."""
    embedding = bart(kind, **options).get_decoder().embed_positions
    row = embedding(torch.zeros(1, 3, dtype=torch.long), 0).flatten(0, -2)[0]
    return next(i for i, other in enumerate(embedding.weight) if torch.equal(other, row))


if __name__ == "__main__":
    marian = bart(hf.MarianMTModel, pad_token_id=31, decoder_start_token_id=31)
    roberta = hf.RobertaModel(hf.RobertaConfig(**SIZES, max_position_embeddings=24, pad_token_id=1)).eval()
    seen: list[torch.Tensor] = []
    roberta.embeddings.position_embeddings.register_forward_hook(lambda m, args, out: seen.append(args[0]))
    roberta(torch.tensor([[1, 1, 5, 6]]))
    rows = {
        "transformers, BERT": {
            "empty": padding_alone(),
            "mask": of_both(masks),
            "causal": f"Llama with a cache: {of_both(cached)}",
            "dropout": f"eager and sdpa: {of_both(dropped)}; flex_attention: {flex_dropout()}; "
            f"a flash kernel without the argument: {flash_dropout()}",
        },
        "transformers, BART": {
            "positions": f"learned, row {first_position(hf.BartForConditionalGeneration)} first; left padding counts",
            "scores": divisor(),
        },
        "transformers, Marian": {
            "positions": shared.table_of_positions(marian.get_decoder().embed_positions.weight.detach().numpy())
        },
        "transformers, RoBERTa": {"positions": f"learned; of a pad, a pad and two words: {seen[0][0].tolist()}"},
        "transformers `LabelSmoother`": {"smoothing": shared.smoothing(smoothed)},
    }
    shared.emit(rows, f"transformers {version('transformers')}, torch {torch.__version__.split('+')[0]}")
