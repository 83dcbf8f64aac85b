"""Models whose layers do not call the attention interface: refused when they ask for a mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast

transformers = pytest.importorskip("transformers", minversion="5")

import huggingface_models as models  # noqa: E402
from transformers.masking_utils import create_causal_mask  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

NAME = "transformer_fast"
IDS = torch.tensor([[5, 6, 7, 8]])


def config_of(name: str) -> Any:
    return models.config_of(models.named(name))


def bloom(**options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(config_of("BloomForCausalLM"), **options)


def refused(config: str = "BloomConfig") -> Any:
    words = f'models of {config} cannot use attn_implementation="transformer_fast": its layers .*="eager"'
    return pytest.raises(NotImplementedError, match=words)


def test_at_its_first_call(tmp_path: Path) -> None:
    config, changed = config_of("BloomForCausalLM"), bloom()
    config._attn_implementation = changed.config._attn_implementation = NAME
    bloom().save_pretrained(tmp_path)
    for model in (
        bloom(attn_implementation=NAME),
        transformers.BloomForCausalLM(config),
        changed,
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=NAME),
    ):
        for _ in range(2):
            with refused():
                model(input_ids=IDS)


def test_transformers_does_not_give_it_the_name_later() -> None:
    model = bloom(attn_implementation="eager").eval()
    expected = model(input_ids=IDS).logits
    model.set_attn_implementation(NAME)  # warns
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(input_ids=IDS).logits, expected)


def test_compiled_first_it_is_as_eager() -> None:
    """A traced call cannot be refused, so it gets eager's mask."""
    torch._dynamo.reset()
    model = bloom(attn_implementation="eager").eval()
    given = {"input_ids": IDS, "attention_mask": torch.tensor([[0, 1, 1, 1]]), "use_cache": False}
    expected = model(**given).logits
    model.config._attn_implementation = NAME
    logits = torch.compile(model, backend="eager")(**given).logits
    torch.testing.assert_close(logits[:, 1:], expected[:, 1:])


@pytest.mark.parametrize("name", ["FalconForCausalLM", "GPTNeoForCausalLM"])
def test_attention_of_its_own_that_says_if_it_is_causal_is_not_fused(name: str) -> None:
    report = tfast.accelerate(transformers.AutoModelForCausalLM.from_config(config_of(name)))
    assert report.attention and all(row.now is None for row in report.attention)
    assert str(report).startswith("attention: not fused in ")


def test_one_part_of_two() -> None:
    case, made = models.named("EncoderDecoderModel", "Bert", "XGLM"), transformers.AutoModelForSeq2SeqLM.from_config
    given = {"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 1, 0]]), "decoder_input_ids": IDS[:, :3]}
    with refused("XGLMConfig"):
        made(models.config_of(case), attn_implementation=NAME)(**given)
    eager = made(models.config_of(case), attn_implementation="eager").eval()
    expected = eager(**given).logits
    eager.set_attn_implementation({"encoder": NAME, "decoder": "eager"})
    assert (eager.encoder.config._attn_implementation, eager.decoder.config._attn_implementation) == (NAME, "eager")
    torch.testing.assert_close(eager(**given).logits, expected)


class Settings(transformers.PretrainedConfig):
    model_type = "written_by_hand"


def softmax_of(scores: Tensor) -> Tensor:
    return scores.softmax(-1)


class Mixing(nn.Module):
    """Attention under another name, with the softmax in a function."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        scores = x @ x.mT
        return softmax_of(scores if attention_mask is None else scores + attention_mask[:, 0]) @ x


def eager_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, sharpness: Any = None
) -> tuple[Tensor, None]:
    """Eager attention of a model's file, with an argument that only this model knows."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    return (softmax_of(scores if attention_mask is None else scores + attention_mask) @ value).transpose(1, 2), None


class Calling(nn.Module):
    """Layer that calls the interface without an is_causal attribute."""

    def __init__(self, config: Any, sharpness: float | None = None) -> None:
        super().__init__()
        self.config, self.is_causal, self.sharpness = config, False, sharpness

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation, eager_attention_forward)
        heads = x.unsqueeze(1)
        return attend(self, heads, heads, heads, attention_mask, sharpness=self.sharpness)[0].flatten(2)


class Handwritten(transformers.PreTrainedModel):
    """Model as in remote code, whose layers are chosen in the constructor."""

    config_class = Settings

    def __init__(self, config: Any, *layers: nn.Module) -> None:
        super().__init__(config)
        self.embed, self.layers = nn.Embedding(40, 8), nn.ModuleList(layers)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        mask = create_causal_mask(self.config, x, attention_mask, past_key_values=None)
        for layer in self.layers:
            x = layer(x, mask)
        return x


def ours() -> Settings:
    config = Settings()
    config._attn_implementation = NAME
    return config


@pytest.mark.parametrize("padding", [None, torch.tensor([[1, 1, 1, 0]])], ids=["none", "right"])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside ours"])
def test_remote_code_with_attention_of_its_own_gets_the_mask_of_eager(beside: bool, padding: Tensor | None) -> None:
    """transformers says of no class of such a file that it cannot use another attention."""
    config = ours()
    torch.manual_seed(0)
    model = Handwritten(config, *[Calling(config)] * beside, Mixing())
    logits = model(IDS, padding)
    config._attn_implementation = "eager"
    torch.testing.assert_close(logits[:, :3], model(IDS, padding)[:, :3])


def test_an_argument_that_only_one_model_has() -> None:
    config = ours()
    with pytest.raises(NotImplementedError, match=r'Calling: .*"transformer_fast" .*\(sharpness=\); use "eager"'):
        Handwritten(config, Calling(config, sharpness=2.0))(IDS)


@pytest.mark.parametrize("padding", [None, torch.tensor([[1, 1, 1, 0]])], ids=["none", "right"])
def test_a_layer_that_does_not_say_it_is_causal_sees_no_later_token(padding: Tensor | None) -> None:
    config = ours()
    model = Handwritten(config, Calling(config))
    changed = IDS.clone()
    changed[:, 2] = 30
    before, after = (model(ids, padding) for ids in (IDS, changed))
    torch.testing.assert_close(before[:, :2], after[:, :2])
    assert not torch.equal(before[:, 2], after[:, 2])


def test_the_config_is_saved_as_before() -> None:
    config = ours()
    Handwritten(config, Calling(config))
    assert not any(NAME in str(item) for item in config.to_dict().items())
