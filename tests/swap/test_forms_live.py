"""Swapped hand-written modules at each call: they read live attributes, children and arguments, keep the weights that
their text stores, and run the author's ``forward`` where a class has got another one."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import handwritten as hw
import pytest
import torch
import torch.nn.functional as F
from accelerated import pair
from changed_children import altered
from form_arguments import B, D, S, fresh, ids, keep, results, x
from handwritten_forms import FORMS
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.dialects.common import LAST_WEIGHTS
from transformer_fast.layers.hooks import has_its_forward
from transformer_fast.reference.dialects import d2l
from transformer_fast.swap.form import form_of
from transformer_fast.swap.swapped import author_class

INTERNAL = nn.Module().__dict__.keys() | {"norm_type"}  # read by torch.nn.Embedding alone
VALUES: dict[str, Callable[[Any], Any]] = {
    "number": lambda old: old + 1 if isinstance(old, int | float) else 2,
    "bool": lambda old: not old if isinstance(old, bool) else True,
    "container": lambda old: {},
    "callable": lambda old: F.gelu,
}


def authors_modules(m: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of a form that are not torch's, by path."""
    for path, part in m.named_modules():
        if not type(part).__module__.startswith("torch."):
            yield path, part


@functools.cache
def attributes(name: str) -> list[tuple[str, str]]:
    """Pairs (path, attribute) of the plain attributes in a form."""
    parts = authors_modules(FORMS[name][0]())
    return [(path, key) for path, part in parts for key in part.__dict__.keys() - INTERNAL]


def outcome(m: nn.Module, args: tuple[Any, ...]) -> Any:
    """Results and gradients of a call, or the kind of error."""
    try:
        return results(m, args)
    except Exception as error:
        return type(error)


def check(m: nn.Module, plain: nn.Module, args: tuple[Any, ...]) -> None:
    ours, theirs = outcome(m, args), outcome(plain, args)
    if isinstance(theirs, type) or isinstance(ours, type):
        assert ours == theirs
    else:
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


def fast_and_plain(name: str) -> tuple[nn.Module, nn.Module, tuple[Any, ...]]:
    """An accelerated form, the plain one, and arguments."""
    make, arguments = FORMS[name]
    plain = make().eval()
    fast = copy.deepcopy(plain)
    tfast.accelerate(fast)
    return fast, plain, arguments()


@pytest.mark.cover("values")
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", FORMS)
def test_every_attribute(name: str, value: str) -> None:
    """An attribute of the text is set before ``accelerate``, or after it."""
    make, arguments = FORMS[name]
    m, args = make().eval(), arguments()
    for path, key in attributes(name):
        plain, before, after = (copy.deepcopy(m) for _ in range(3))
        tfast.accelerate(after)
        for model in (plain, before, after):
            part = model.get_submodule(path)
            setattr(part, key, VALUES[value](part.__dict__.get(key)))
        tfast.accelerate(before)
        check(before, plain, args)
        check(after, plain, args)


@pytest.mark.parametrize("name", FORMS)
def test_a_replaced_forward(name: str) -> None:
    """A class gets another ``forward``, and its own again; both models share the class."""
    fast, plain, args = fast_and_plain(name)
    for kind in dict.fromkeys(type(part) for _, part in authors_modules(plain)):
        forward = kind.forward
        kind.forward = wrapped(forward)  # type: ignore[method-assign]
        check(fast, plain, args)
        kind.forward = forward  # type: ignore[method-assign]
        assert all(has_its_forward(type(part)) for part in fast.modules())
    check(fast, plain, args)


def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(forward)(lambda *args, **kwargs: altered(forward(*args, **kwargs)))


@pytest.mark.parametrize("name", FORMS)
def test_a_forward_set_on_the_class_of_a_part(name: str) -> None:
    """``type(part).forward = ...`` is the class of this package, which a parent must then call."""
    fast, plain, args = fast_and_plain(name)
    for path, part in fast.named_modules():
        if not path or form_of(part) is None:
            continue
        kind = type(part)
        forward = kind.forward
        kind.forward = functools.partialmethod(other, forward)  # type: ignore[assignment]
        others = [plain.get_submodule(p) for p, m in fast.named_modules() if type(m) is kind]
        for m in others:
            m.forward = functools.partial(other, m, type(m).forward)  # type: ignore[method-assign]
        torch.testing.assert_close(results(fast, args), results(plain, args), atol=5e-5, rtol=5e-5)
        kind.forward = forward  # type: ignore[method-assign]
        for m in others:
            del m.forward  # type: ignore[attr-defined]


def other(m: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return altered(forward(m, *args, **kwargs))


def test_a_class_that_is_changed_between_two_calls() -> None:
    class Norm(hw.AnnotatedNorm):
        pass

    first = Norm(D)
    tfast.accelerate(first)
    Norm.forward = lambda self, x: 2 * hw.AnnotatedNorm.forward(self, x)  # type: ignore[method-assign]
    second, rows = Norm(D), x()
    assert tfast.accelerate(second).rows[0].now is None
    for m in (first, second):
        plain = Norm(D)
        plain.load_state_dict(m.state_dict())
        torch.testing.assert_close(m(rows), plain(rows))


def test_new_values_are_read() -> None:
    """A parameter, a buffer or a child of the same kind may be exchanged."""
    for name, key in (("annotated norm", "a_2"), ("embeddings", "lut"), ("positions", "pe")):
        fast, plain, args = fast_and_plain(name)
        for m in (fast, plain):
            new = copy.deepcopy(getattr(plain, key))
            for tensor in [new] if isinstance(new, Tensor) else new.parameters():
                tensor.data += 0.5
            setattr(m, key, new)
        check(fast, plain, args)


def test_a_new_module_of_a_swapped_class() -> None:
    """The numbers are those of the author's class."""
    fast, plain, args = fast_and_plain("annotated norm")
    new = type(fast)(D)
    new.load_state_dict(plain.state_dict())
    check(new, plain, args)
    assert author_class(type(new)) is type(plain)
    check(pickle.loads(pickle.dumps(new)), plain, args)


@pytest.mark.parametrize("name", ["annotated attention", "annotated encoder layer", "d2l encoder"])
def test_a_compiled_call_sees_a_new_value(name: str) -> None:
    torch._dynamo.reset()
    fast, plain, args = fast_and_plain(name)
    compiled = torch.compile(fast, backend="eager", fullgraph=True)
    for h in (2, 4, 2):
        for part in (part for m in (fast, plain) for _, part in authors_modules(m)):
            for key in ("h", "num_heads"):
                if key in part.__dict__:
                    setattr(part, key, h)
            if "d_k" in part.__dict__:
                part.d_k = D // h  # type: ignore[assignment]
        with torch.no_grad():
            torch.testing.assert_close(compiled(*map(fresh, args)), plain(*map(fresh, args)), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["annotated attention", "d2l encoder, the chapter's", "d2l decoder, the chapter's"])
def test_a_model_that_was_called_before_is_swapped_and_gets_its_attributes_back(name: str) -> None:
    make, arguments = FORMS[name]
    m, args = make(), arguments()
    m(*map(fresh, args))
    left = {key: value for key, value in m.__dict__.items() if "att" in key}
    assert left
    report = tfast.accelerate(m)
    assert report.rows[0].now, report
    for key in left:
        assert getattr(m, key) is left[key]
    m(*map(fresh, args))
    assert all(getattr(m, key) is not left[key] for key in left)
    report.undo()
    assert {key: m.__dict__[key] for key in left} == left
    assert not any(LAST_WEIGHTS in vars(part) for part in m.modules())


def test_weights_of_a_whole_stack_are_computed_when_looked_at() -> None:
    stack = (11, D, 12, 2, 2, 0.1)
    encoder, decoder = d2l.TransformerEncoder(*stack).eval(), hw.D2lDecoder(*stack).eval()
    tokens, memory, lens = ids(), x(S), torch.tensor([2, 4])

    def weights(encoder: nn.Module, decoder: nn.Module) -> tuple[Any, ...]:
        encoder(tokens, lens), decoder(tokens, [memory, lens, [None, None]])
        return encoder.attention_weights, *decoder.attention_weights

    fast = pair(encoder)[1], pair(decoder)[1]
    torch.testing.assert_close(weights(*fast), weights(encoder, decoder))


def test_an_author_s_property_of_weights_stays() -> None:
    plain, m, _ = pair(d2l.TransformerEncoder(11, D, 12, 2, 2, 0.1).eval())
    m.embedding.register_forward_hook(lambda *_: None)  # the stack runs as it was written, the blocks do not
    tokens, lens = ids(), torch.tensor([2, 4])
    torch.testing.assert_close(m(tokens, lens), plain(tokens, lens))
    torch.testing.assert_close(m.attention_weights, plain.attention_weights)


def test_keyword_arguments_by_the_module_s_own_names() -> None:
    plain, m, _ = pair(hw.AnnotatedAttention(2, D).eval())
    q, k, mask = x(), x(S), keep(B, 1, S)
    for found in (m(value=k, query=q, key=k, mask=mask), m(q, k, mask=mask, value=k)):
        torch.testing.assert_close(found, plain(q, k, k, mask))
    for args, wrong in (((q, k), {}), ((q, k), {"valu": k}), ((q, k, k), {"valu": k})):
        with pytest.raises(TypeError):
            m(*args, **wrong)


def test_weights_left_behind_are_computed_when_looked_at() -> None:
    args, mask, lens = (x(), x(S), x(S)), keep(B, 1, S), torch.tensor([1, 4])
    m, fast, _ = pair(hw.AnnotatedAttention(2, D).eval())
    by_lengths = pair(hw.DotProductAttention(0.1).eval())[:2]
    for model in (m, fast):
        model(*args, mask)
    for model in by_lengths:
        model(*args, lens)
    torch.testing.assert_close(fast.attn, m.attn)
    torch.testing.assert_close(*(model.attention_weights for model in by_lengths))
    fast.dropout.register_forward_hook(lambda *_: None)  # the module runs as it was written
    fast(*args, mask)
    torch.testing.assert_close(fast.attn, m.attn)


def test_an_argument_that_the_text_s_module_does_not_have() -> None:
    class Own(hw.AnnotatedAttention):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, cache: Any = None) -> Tensor:
            return super().forward(query, key, value, mask) if cache is None else cache

    class Shifted(hw.AnnotatedNorm):
        def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
            return super().forward(x) if shift is None else super().forward(x) + shift

    q, more = x(), x()
    plain, m, report = pair(lambda: nn.ModuleList([Own(2, D).eval(), Shifted(D)]))
    assert any(row.path == "0" for row in report.swapped)
    given = [(0, (q, q, q), {}), (0, (q, q, q), {"cache": more}), (0, (q, q, q, None, more), {})]
    for place, args, keywords in (*given, (1, (q,), {}), (1, (q, more), {})):
        torch.testing.assert_close(m[place](*args, **keywords), plain[place](*args, **keywords))


def test_padding_of_embeddings_gets_no_gradient() -> None:
    m = hw.Embeddings(D, 11)
    m.lut.padding_idx = 3
    assert tfast.accelerate(m).rows[0].now
    m(torch.arange(11)).sum().backward()
    assert m.lut.weight.grad[3].eq(0).all() and m.lut.weight.grad[4].ne(0).all()


def test_an_attribute_of_a_module_is_not_hidden() -> None:
    """Attributes of a module stay visible, even those with the name of a pattern's attribute."""

    class Own(hw.AnnotatedAttention):
        def calls(self) -> str:
            return "mine"

        def fits(self) -> str:
            return "mine"

        weights = parts = keywords = "mine"

    m = Own(2, D)
    assert tfast.accelerate(m).rows[0].now == "fused AnnotatedHeads"
    assert {m.calls(), m.fits(), m.weights, m.parts, m.keywords} == {"mine"}


def test_positions_past_the_table_and_of_other_types_are_the_module_s_own_affair() -> None:
    m = hw.Positions(D, 0.0, max_len=4)
    tfast.accelerate(m)
    assert m(x(3).to(torch.bfloat16)).dtype == torch.float32
    with pytest.raises(RuntimeError):
        m(x(5))
