"""Pictures show the values that they are made from."""

import math
import subprocess
import sys

import matplotlib.figure
import matplotlib.image
import numpy as np
import pytest
import torch

from transformer_fast import Transformer, positional_table, reference
from transformer_fast.cli import plots
from transformer_fast.translation.numbers import english, german
from transformer_fast.translation.tokenizer import Tokenizer


@pytest.fixture
def figures(monkeypatch):
    """Return every saved figure."""
    saved = []
    save = matplotlib.figure.Figure.savefig

    def record(figure, path, **options):
        saved.append(figure)
        save(figure, path, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", record)
    return saved


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([spell(n) for n in range(300) for spell in (english, german)], vocab_size=70)


def by_hand(model, src, trg):
    """Compute the cross-attention weights of every layer with the reference classes' submodules and plain PyTorch."""
    memory, x = model.encoder(src, None), model.decoder.pe(model.decoder.embed(trg))
    look_ahead = reference.layers.subsequentmask(trg.shape[1])
    found = []
    for layer in model.decoder.layers:
        y = layer.norm_1(x)
        query = layer.norm_2(x + layer.attn_1(y, y, y, look_ahead))
        split = lambda t, h=layer.attn_2.h: t.unflatten(-1, (h, -1)).transpose(1, 2)  # noqa: E731
        q, k = split(layer.attn_2.q_linear(query)), split(layer.attn_2.k_linear(memory))
        found.append((q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)[0].detach())
        x = layer(x, memory, None, look_ahead)
    return found


def test_cross_attention_is_the_models_own():
    options = (30, 30, 16, 2, 4, 0.3)
    eager = reference.layers.Transformer(*options)
    fast = Transformer(*options)
    fast.load_state_dict(eager.state_dict())
    src, trg = torch.randint(30, (1, 9)), torch.randint(30, (1, 6))
    fast.train()
    got = plots.cross_attention(fast, src, trg)
    assert fast.training and [tuple(weights.shape) for weights in got] == [(4, 6, 9)] * 2
    for weights, expected in zip(got, by_hand(eager.eval(), src, trg), strict=True):
        torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5)
    assert not fast.decoder.layers[0].attn_2._forward_pre_hooks
    with pytest.raises(ValueError, match="expected one sentence"):
        plots.cross_attention(fast, src.expand(2, -1), trg)


def test_attention_picture(tmp_path, figures, tokenizer):
    model = Transformer(len(tokenizer), len(tokenizer), 16, 2, 4, 0.1).eval()
    [ids] = tokenizer.encode([german(41)])
    path = plots.attention_picture(tmp_path / "new" / "a.png", model, tokenizer, english(41), ids)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    [figure] = figures
    main, *rest = [axes for axes in figure.get_axes() if axes.images]
    assert len(rest) == 2 * 4 and english(41) in figure.get_suptitle() and german(41) in figure.get_suptitle()
    read = [label.get_text() for label in main.get_xticklabels()]
    written = [label.get_text() for label in main.get_yticklabels()]
    assert "".join(read).replace("\u00b7", " ").strip() == english(41) + "end"
    assert "".join(written).replace("\u00b7", "") == german(41) + "end"
    shown = main.images[0].get_array()
    assert shown.shape == (len(written), len(read))
    np.testing.assert_allclose(shown.sum(axis=1), 1, atol=1e-5)  # a row is the attention of one target piece


def test_the_sharpest_layer_is_shown():
    vague, sharp = torch.full((4, 5, 6), 1 / 6), torch.eye(6)[None, :5].expand(4, -1, -1)
    assert plots._entropy(sharp) == 0 and plots._entropy(vague) == pytest.approx(math.log(6))


def test_positional_picture(tmp_path, figures):
    assert plots.positional_picture(tmp_path / "pe.png").stat().st_size > 20_000
    [figure] = figures
    curves, sines, cosines = figure.get_axes()[:3]
    assert len(curves.lines) == 4
    for line, dimension in zip(curves.lines, range(4, 8), strict=True):
        np.testing.assert_array_equal(line.get_ydata(), positional_table(100, 20)[:, dimension])
    table = positional_table(200, 128)
    for axes, first in ((sines, 0), (cosines, 1)):
        np.testing.assert_array_equal(axes.images[0].get_array(), table[:, first::2].T)


def test_a_dark_picture_has_a_dark_ground_and_light_words(tmp_path, figures):
    plots.positional_picture(tmp_path / "light.png")
    plots.positional_picture(tmp_path / "dark.png", dark=True)
    light, dark = (matplotlib.image.imread(tmp_path / f"{name}.png")[..., :3] for name in ("light", "dark"))
    assert light[:20, :20].min() == 1 and dark[:20, :20].max() < 0.2
    words = [text for text in figures[1].findobj(matplotlib.text.Text) if text.get_text()]
    assert words and all(min(matplotlib.colors.to_rgb(text.get_color())) > 0.5 for text in words)
    assert [line.get_ydata().tolist() for line in figures[1].axes[0].lines] == [
        line.get_ydata().tolist() for line in figures[0].axes[0].lines
    ]


def test_plot_needs_no_package_of_translation(tmp_path):
    """The page says that pictures need matplotlib alone."""
    hide = "import sys; sys.modules.update(sentencepiece=None, sacrebleu=None, safetensors=None)"
    program = f"{hide}; from transformer_fast import cli; sys.exit(cli.main(['plot', '--out', {str(tmp_path)!r}]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "positional_encoding.png").exists(), done.stderr
