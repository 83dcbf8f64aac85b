"""Faults in what puts the fused ops into models, and in batches without padding."""

from .fault import Fault

ROWS = (
    Fault(
        name="an object that modules hold is changed for other models too",
        path="transformer_fast/accelerate/held_objects.py",
        old="            copy = object.__new__(made)\n            vars(copy).update(vars(value))\n",
        new='            copy = value\n            object.__setattr__(copy, "__class__", made)\n',
        tests=("tests/accelerate/test_held_objects.py",),
    ),
    Fault(
        name="undo leaves the changes of other code",
        path="transformer_fast/accelerate/report.py",
        old="                change.undo()\n",
        new="                change\n",
        tests=(
            "tests/accelerate/test_huggingface_undo.py",
            "tests/accelerate/test_accelerate.py",
        ),
    ),
    Fault(
        name="undo takes back a class that was changed since",
        path="transformer_fast/accelerate/report.py",
        old="                if type(module) is fast:\n",
        new="                if True:\n",
        tests=("tests/accelerate/test_accelerate.py",),
    ),
    Fault(
        name="an exception leaves the model half swapped",
        path="transformer_fast/accelerate/engine.py",
        old="            walk.report.undo()\n            raise",
        new="            raise",
        tests=("tests/accelerate/test_beside_others.py",),
    ),
    Fault(
        name="an attention with add_zero_attn is swapped",
        path="transformer_fast/accelerate/torch_swaps.py",
        old='have" if module.add_zero_attn else ""',
        new='have" if False else ""',
        tests=("tests/accelerate/test_accelerate.py",),
    ),
    Fault(
        name="a pattern is not compared with the module before it is swapped",
        path="transformer_fast/accelerate/engine.py",
        old="difference = obstacle or self._probe(module, pattern)",
        new="difference = obstacle",
        tests=(
            "tests/accelerate/test_accelerate.py",
            "tests/accelerate/test_handwritten.py",
            "tests/accelerate/test_forms.py",
        ),
    ),
    Fault(
        name="a swapped module runs fused though a part has got a hook",
        path="transformer_fast/accelerate/patterns/base.py",
        old=" or (part.fused and not is_plain(member))",
        new="",
        tests=("tests/layers/test_children.py",),
    ),
    Fault(
        name="a changed attribute is not noted",
        path="transformer_fast/accelerate/made.py",
        old="        module.__dict__[CHANGED] = changed\n",
        new="        pass\n",
        tests=("tests/accelerate/test_changed_since.py",),
    ),
    Fault(
        name="proofs of modules with other values of buffers are one",
        path="transformer_fast/accelerate/probe.py",
        old="return tuple(value.shape), value.dtype, _content(value)",
        new="return tuple(value.shape), value.dtype",
        tests=("tests/accelerate/test_changed_elsewhere.py",),
    ),
    Fault(
        name="the pattern of attention forgets the mask",
        path="transformer_fast/accelerate/patterns/attention.py",
        old="heads = attend(m.dropout, q, k, v, mask)",
        new="heads = attend(m.dropout, q, k, v, None)",
        tests=(
            "tests/accelerate/test_handwritten.py",
            "tests/accelerate/test_forms.py",
        ),
    ),
    Fault(
        name="the loss of logits that were read before is fused all the same",
        path="transformer_fast/accelerate/lazy_logits.py",
        old="or logits.dim() != 2 or logits.node.is_read():",
        new="or logits.dim() != 2:",
        tests=(
            "tests/accelerate/test_loss.py",
            "tests/accelerate/test_loss_graph.py",
            "tests/accelerate/test_loss_calls.py",
        ),
    ),
    Fault(
        name="the fused loss does not see a write through .data",
        path="transformer_fast/accelerate/lazy_logits.py",
        old="return self._state() == self._seen",
        new="return self._state()[0] == self._seen[0]",
        tests=(
            "tests/accelerate/test_loss.py",
            "tests/accelerate/test_loss_graph.py",
            "tests/accelerate/test_loss_calls.py",
        ),
    ),
    Fault(
        name="a sequence's first token is what the sequence before it predicts",
        path="transformer_fast/accelerate/packed/model.py",
        old="tokens = nn.functional.pad(tokens, (0, 1)).index_fill(0, starts, IGNORED)[:-1]",
        new="tokens = tokens.clone()",
        tests=("tests/accelerate/test_packed_transformers.py",),
    ),
    Fault(
        name="a hook reads zeros at padding",
        path="transformer_fast/accelerate/packed/watch.py",
        old="if module is not model and has_hooks(module):",
        new="if False:",
        tests=("tests/accelerate/test_packed_users.py",),
    ),
    Fault(
        name="a window is counted over gaps",
        path="transformer_fast/accelerate/packed/layer.py",
        old="if (own.has_gaps and (window or biased)) or (biased and source is not None and source.has_gaps):",
        new="if biased and (own.has_gaps or (source is not None and source.has_gaps)):",
        tests=("tests/accelerate/test_packed_transformers.py",),
    ),
    Fault(
        name="a look-ahead of torch's stacks is forgotten without padding",
        path="transformer_fast/layers/torch_packed.py",
        old="padder = Padder(*packings, causal=causal[0])",
        new="padder = Padder(*packings)",
        tests=("tests/accelerate/test_packed_stacks.py",),
    ),
    Fault(
        name="a layer that mixes tokens is not found out",
        path="transformer_fast/accelerate/packed/trial.py",
        old="same = not bool(actual[~keep].any()) and _close(actual[keep], expected[keep])",
        new="same = True",
        tests=("tests/accelerate/test_packed_users.py",),
    ),
)
