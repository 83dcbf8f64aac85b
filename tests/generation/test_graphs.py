"""Decoding steps for CUDA graphs, tested without a GPU: steps run the same ops on the same shapes and addresses, none
waits for a value on the device, and the answers are equal."""

import functools

import pytest
import torch
from tiny_transformer import MARKS, VOCAB, answers, assert_same, batch, never_ending, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from transformer_fast import GenerationConfig, beam_search, generate
from transformer_fast.generation import graphs
from transformer_fast.generation.decoding import CachedDecoding, evaluating
from transformer_fast.generation.graphs import StepGraphs, obstacle, row_class
from transformer_fast.generation.greedy import GreedySearch
from transformer_fast.generation.request import Request, check_request
from transformer_fast.generation.rules import Rules


class Recording(TorchDispatchMode):
    """Record of a step as a graph would make it: each op with shapes, numbers, and addresses of earlier tensors."""

    def __init__(self):
        super().__init__()
        self.calls, self._made, self._kept = [], set(), []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(op.tags), f"{op} waits"
        told = []
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                if leaf.is_mkldnn:  # a weight in blocks, which has no address
                    told.append(id(leaf))
                    continue
                inside = leaf.untyped_storage().data_ptr() in self._made
                told.append((tuple(leaf.shape), leaf.stride(), leaf.dtype, None if inside else leaf.data_ptr()))
            else:
                told.append(leaf)
        out = op(*args, **kwargs)
        given = (t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and not t.is_mkldnn)
        known = {t.untyped_storage().data_ptr() for t in given}
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in known:
                self._made.add(leaf.untyped_storage().data_ptr())
                self._kept.append(leaf)  # an address that is free again could be taken for this one
        self.calls.append((str(op), told))
        return out


def recorded(step):
    with Recording() as recording:
        return step(), recording.calls


class FakeCapture:
    """Replacement of a graph capture: replay runs the step again and checks that it does what was recorded."""

    def __init__(self):
        self.captured = self.replayed = 0

    def __call__(self, step):
        step()  # tensors of a first call exist from the second call on
        expected = recorded(step)[1]
        assert len(expected) > 20
        self.captured += 1

        def replay():
            self.replayed += 1
            logits, calls = recorded(step)
            assert calls == expected
            return logits

        return replay


@pytest.fixture
def capture(monkeypatch):
    """Let `graph=True` work on this CPU with FakeCapture."""
    capture = FakeCapture()
    cuda = torch.device("cuda")
    monkeypatch.setattr(graphs, "obstacle", lambda device, *rest: obstacle(cuda, *rest))
    monkeypatch.setattr(graphs, "StepGraphs", functools.partial(StepGraphs, capture=capture))
    return capture


@pytest.mark.cover("values")
@pytest.mark.parametrize("search", [{}, {"beam": 3, "n_best": 3}, {"sample": True, "n_best": 2, "seed": 3}], ids=str)
@pytest.mark.parametrize("form", [{}, {"norm": "std"}, {"norm": "rms"}, {"norm_first": False}], ids=str)
def test_answers_are_those_without_a_cache(capture, form, search):
    ways = ({"graph": True}, {"cache": False})
    assert_same(*(answers(tiny(1, **form), batch(seed=1), **search, max_length=25, **way) for way in ways))
    assert 0 < capture.captured < capture.replayed / 3


def test_a_class_of_shapes_is_captured_once(capture):
    """Decode past a block of the cache and the positional table, with fewer rows as sentences end."""
    model = never_ending(tiny(2, max_len=40))
    src, _ = batch(5, seed=2)
    limits = torch.tensor([70, 20, 20, 30, 130])
    given = {"max_length": limits, "beam": 1, **MARKS}
    expected = beam_search(model, src, cache=False, **given)
    assert capture.captured == 0
    request = check_request(model, src, src_lengths=None, src_mask=None, pad=None, max_length=limits, **MARKS)
    config = GenerationConfig(graph=True)
    with evaluating(model):
        found = GreedySearch([model], request, config, Rules(config, request)).run()
    assert [h[0].tokens for h in found] == [h[0].tokens for h in expected]
    # Rows 8 (five sentences), 4 and 2 on 64 positions; 2, then 1, on 128; 1 on 256.
    assert (capture.captured, capture.replayed) == (6, 130)


def test_rows_come_in_classes():
    assert [row_class(n) for n in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_value_is_asked_for(monkeypatch, dtype):
    """Tensors have no values, so a step that waits for one fails."""
    monkeypatch.setattr(graphs, "StepGraphs", functools.partial(StepGraphs, capture=lambda run: run))
    model = tiny(0, dtype).to("meta")
    with torch.inference_mode():
        memory = torch.empty(3, 7, 32, dtype=dtype, device="meta")
        mask = torch.empty(3, 1, 7, dtype=torch.bool, device="meta")
        ids = torch.empty(3, 7, dtype=torch.long, device="meta")
        request = Request(ids, mask, ids[:, 0], bos=0, eos=1)
        step = CachedDecoding(model.decoder, model.out, memory, request, GenerationConfig(graph=True), rows=6)
        for _ in range(2):
            logits = step.next_logits(ids[:, :1], check=False)
            step.select(torch.tensor([2, 0, 0]))
    assert logits.shape == (3, VOCAB) and logits.device.type == "meta"


REFUSED = {
    "on a CPU": ({}, {}, "needs a CUDA device, and the model is on cpu"),
    "no cache": ({"cache": False}, {}, "only cached steps"),
    "alignments": ({"alignments": True}, {}, "alignments and the coverage penalty"),
    "coverage": ({"coverage_penalty": 0.1}, {}, "alignments and the coverage penalty"),
    "holes in the source": ({}, {"src_mask": torch.tensor([[[True, False, True]]])}, "padding on the right"),
    "an empty source": ({}, {"src_lengths": torch.tensor([0])}, "padding on the right"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_recorded_is_refused(case, request):
    options, given, message = REFUSED[case]
    if case != "on a CPU":
        request.getfixturevalue("capture")
    src = torch.tensor([[4, 5, 6]])
    with pytest.raises(ValueError, match=f"graph=True is not possible: .*{message}"):
        generate(tiny(), src, config=GenerationConfig(graph=True, **options), **given, **MARKS)
