"""Choice of a backend: by context manager, by environment, and errors where the backend cannot run."""

import asyncio
import copy
import itertools
import threading
import warnings

import pytest
import torch
from subprocesses import program, python

import transformer_fast as tfast
from transformer_fast import backends

IMPORTS = "import transformer_fast as tfast\nfrom transformer_fast import backends\n"


def test_the_context_manager_nests_and_restores():
    assert backends.current() == "auto"
    with tfast.backend("reference"):
        assert backends.current() == "reference"
        with tfast.backend("native"):
            assert backends.current() == "native"
        assert backends.current() == "reference"
    assert backends.current() == "auto"


def test_the_environment_is_read_the_context_manager_wins_and_no_heavy_extra_is_loaded():
    """Neither Triton, nor the compiler, nor packages for training and pictures are imported, unless torch imports
    them."""
    code = f"""
import sys, torch
before = set(sys.modules)
{IMPORTS}
heavy = {{'triton', 'torch._dynamo', 'matplotlib', 'sentencepiece', 'sacrebleu', 'safetensors', 'tqdm'}}
assert not heavy & (set(sys.modules) - before), heavy & set(sys.modules)
print(backends.current())
with tfast.backend('auto'): print(backends.current())
"""
    assert program(code, TRANSFORMER_FAST_BACKEND="reference") == "reference\nauto\n"


def test_a_wrong_environment_imports_and_is_an_error_where_it_is_used():
    done = python("-c", IMPORTS + "print('imported')\nbackends.current()", TRANSFORMER_FAST_BACKEND="fast")
    assert done.returncode != 0 and done.stdout == "imported\n"
    expected = "TRANSFORMER_FAST_BACKEND: expected one of auto, native, triton, reference, got 'fast'"
    assert done.stderr.endswith(f"ValueError: {expected}\n")


def test_every_op_is_native_on_cpu():
    for op in ("attention", "norm", "dropout", "embedding"):
        assert backends.choose(op, torch.device("cpu"), torch.float32) == ("native", "the default on cpu")


@pytest.mark.parametrize("op", ["attention", "norm", "dropout"])
def test_triton_on_cpu_tensors_is_an_error_that_says_what_to_do(op, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with tfast.backend("triton"), pytest.raises(tfast.BackendError, match="TRITON_INTERPRET=1"):
        backends.choose(op, torch.device("cpu"), torch.float32)


def test_triton_leaves_embedding_to_the_extension():
    with tfast.backend("triton"):
        name, reason = backends.choose("embedding", torch.device("cpu"), torch.float32)
    assert name == "native" and "no Triton kernel" in reason


@pytest.fixture
def _forgetful():
    """Clear the cache of resolved backends before and after the test."""
    backends._resolved.cache_clear()
    yield
    backends._resolved.cache_clear()


@pytest.mark.usefixtures("_forgetful")
def test_auto_falls_back_with_one_warning(monkeypatch):
    monkeypatch.setattr(backends.extension, "load", lambda: False)
    monkeypatch.setattr(backends.extension, "module", lambda: None)
    monkeypatch.setattr(backends.extension, "status", lambda: "not loaded")  # without a remedy
    monkeypatch.setattr(backends.extension, "obstacle", lambda: "the extension is missing: run `make setup`")
    q = torch.randn(1, 1, 2, 4)
    with pytest.warns(UserWarning, match="eager reference: the extension is missing: run `make setup`"):
        tfast.attention(q, q, q)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tfast.attention(q, q, q)
    assert "run `make setup`" in tfast.explain(q, q, q)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for backend in ("native", "triton"):  # the ops of both are registered by the extension
        with tfast.backend(backend), pytest.raises(tfast.BackendError, match="run `make setup`"):
            tfast.attention(q, q, q)


def test_other_devices_take_the_reference():
    assert backends.choose("norm", torch.device("mps"), torch.float32)[0] == "reference"


dialects, SIZES = tfast.dialects, (11, 16, 24, 4, 1, 0.1)
META = {  # function that makes the model, and a call of the model
    "classic": (
        lambda: tfast.Transformer(11, 11, 16, 1, 4, 0.1),
        lambda m, ids, x, lens, keep: m(ids, ids, tfast.AttentionMask.lengths(lens), None),
    ),
    "bert": (lambda: dialects.bert.MultiHeadedAttention(4, 16), lambda m, ids, x, lens, keep: m(x, x, x, keep)),
    "tensorflow": (
        lambda: dialects.tensorflow.Transformer(1, 16, 4, 24, 11, 11, 50, 50),
        lambda m, ids, x, lens, keep: m(ids, ids, *dialects.tensorflow.create_masks(ids, ids))[0],
    ),
    "d2l": (
        lambda: dialects.d2l.EncoderDecoder(
            dialects.d2l.TransformerEncoder(*SIZES), dialects.d2l.TransformerDecoder(*SIZES)
        ),
        lambda m, ids, x, lens, keep: m(ids, ids, lens)[0],
    ),
    "accelerated": (
        lambda: torch.nn.Transformer(16, 4, 1, 1, 24, batch_first=True),
        lambda m, ids, x, lens, keep: m(x, x, src_key_padding_mask=~keep[:, 0, 0]),
    ),
}


@pytest.mark.parametrize("name", META)
def test_models_on_the_meta_device_tell_shapes(name):
    """Models are built, called and differentiated on the meta device; then a state dict gives them values."""
    make, call = META[name]
    real = make()
    if name == "accelerated":
        tfast.accelerate(real)
    inputs = [torch.ones(2, 5, dtype=torch.int64), torch.randn(2, 5, 16), torch.tensor([5, 3])]
    inputs.append(torch.ones(2, 1, 1, 5, dtype=torch.bool))
    out = call(real, *inputs)
    with torch.device("meta"):
        model = copy.deepcopy(real).to("meta") if name == "accelerated" else make()
        shape = call(model, *(t.to("meta") for t in inputs))
        shape.sum().backward()
    assert shape.is_meta and shape.shape == out.shape and shape.dtype == out.dtype
    assert all(p.grad.shape == p.shape for p in model.parameters())
    model.load_state_dict(real.state_dict(), assign=True)
    assert torch.equal(call(model.eval(), *inputs), call(real.eval(), *inputs))


class Nested(torch.autograd.Function):
    """Autograd function whose backward starts another backward, recursively; PyTorch moves deep ones to another
    thread."""

    @staticmethod
    def forward(ctx, x, depth, note):
        ctx.depth, ctx.note = depth, note
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.depth == 0:
            ctx.note(threading.get_ident(), backends.current())
        else:
            with torch.enable_grad():
                Nested.apply(torch.zeros(1, requires_grad=True), ctx.depth - 1, ctx.note).backward()
        return grad, None, None


@pytest.mark.parametrize("depth", [0, 80], ids=["same thread", "another thread"])
def test_a_backward_has_the_backend_of_the_process(depth):
    seen = []

    def backward():
        Nested.apply(torch.zeros(1, requires_grad=True), depth, lambda *noted: seen.append(noted)).backward()

    backward()
    with tfast.backend("reference"):
        with tfast.backend("native"):
            backward()
        backward()
    backward()
    assert [backend for _, backend in seen] == ["auto", "native", "reference", "auto"]
    assert all((thread == threading.get_ident()) is (depth == 0) for thread, _ in seen)


def test_threads_share_the_choice():
    """The blocks of two threads overlap; the first that is entered is left first."""
    inside, left, seen = threading.Event(), threading.Event(), {}

    def other():
        seen["at the start"] = backends.current()
        with tfast.backend("native"):
            inside.set()
            assert left.wait(60)
            seen["inside"] = backends.current()
        seen["after"] = backends.current()

    with tfast.backend("reference"):
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(60)
        seen["here"] = backends.current()
    left.set()
    thread.join()
    assert seen == {"at the start": "reference", "here": "native", "inside": "native", "after": "auto"}
    assert backends.current() == "auto" and not backends._blocks


def test_blocks_of_many_threads_leave_nothing_behind():
    names, start = ["reference", "native", "auto"], threading.Barrier(8)

    def work(number):
        start.wait()
        for turn in range(300):
            with tfast.backend(names[(number + turn) % 3]):
                assert backends.current() in names

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert backends.current() == "auto" and not backends._blocks


def test_an_op_in_another_thread_runs_on_the_backend_of_the_process(monkeypatch):
    calls, forward = [], tfast.reference.norm.layer_norm
    monkeypatch.setattr(tfast.reference.norm, "layer_norm", lambda *a, **b: calls.append(1) or forward(*a, **b))
    thread = threading.Thread(target=tfast.layer_norm, args=(torch.ones(2, 4), None, None))
    with tfast.backend("reference"):
        thread.start()
        thread.join()
    assert calls == [1]


@pytest.mark.parametrize("left", list(itertools.permutations(range(3))), ids=str)
def test_blocks_that_are_left_in_any_order_leave_nothing_behind(left):
    """The block that was entered last, of those not left, decides; so generators see it, and nothing stays."""

    def block(name):
        with tfast.backend(name):
            yield

    names = ["reference", "native", "reference"]
    blocks = [block(name) for name in names]
    for each in blocks:
        next(each)
    inside = list(range(3))
    for number in left:
        blocks[number].close()
        inside.remove(number)
        assert backends.current() == (names[inside[-1]] if inside else "auto")
    assert not backends._blocks


def test_tasks_of_asyncio_leave_nothing_behind():
    async def task(name):
        with tfast.backend(name):
            await asyncio.sleep(0)

    async def tasks():
        await asyncio.gather(*map(task, ["reference", "native", "reference"]))

    asyncio.run(tasks())
    assert backends.current() == "auto" and not backends._blocks


def test_a_compiled_function_follows_the_choice_of_the_process():
    compiled = torch.compile(lambda x: x + 1 if backends.current() == "auto" else x - 1, backend="eager")
    zero, seen = torch.zeros(()), []

    def call():
        seen.append(compiled(zero).item())

    call()
    with tfast.backend("reference"):
        call()
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    call()
    assert seen == [1, -1, -1, 1]


def test_a_block_in_a_compiled_function():
    def run(x):
        with tfast.backend("reference"):
            inside = x + 1 if backends.current() == "reference" else x - 1
        return inside, x + 1 if backends.current() == "auto" else x - 1

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    for _ in range(2):
        assert [t.item() for t in compiled(torch.zeros(()))] == [1, 1]
        assert backends.current() == "auto" and not backends._blocks
