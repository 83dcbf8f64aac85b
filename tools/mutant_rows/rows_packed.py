"""Faults in models without padding."""

from .fault import Fault
from .places import PACKAGE

PACKED = PACKAGE + "accelerate/packed/"
CALLS, MODELS, STACKS = (f"tests/accelerate/test_packed_{name}.py" for name in ("calls", "transformers", "stacks"))

ROWS = (
    Fault(
        name="a sequence's first token is what the sequence before it predicts",
        path=PACKED + "model.py",
        old="tokens = tokens.index_fill(0, starts[starts < tokens.shape[0]], IGNORED)",
        new="tokens = tokens.clone()",
        tests=(MODELS,),
    ),
    Fault(
        name="labels at padding are dropped without a word",
        path=PACKED + "model.py",
        old="if _reads_padding(labels != IGNORED, keep, shifts):",
        new="if False:",
        tests=(CALLS,),
    ),
    Fault(
        name="a packed call keeps keys and values of all sequences in one row",
        path=PACKED + "layer.py",
        old="if any(given.get(name) is not None for name in CACHES):",
        new="if False:",
        tests=(CALLS,),
    ),
    Fault(
        name="a hook inside a layer sees tokens",
        path=PACKED + "layer.py",
        old="if (hooked := next((m for m in layer.modules() if m is not layer and has_hooks(m)), None)) is not None:",
        new="if (hooked := None) is not None:",
        tests=(CALLS,),
    ),
    Fault(
        name="rotary positions are those of the first tokens",
        path=PACKED + "layer.py",
        old="return value[0].index_select(0, packing.positions).unsqueeze(0)",
        new="return value[:, : packing.total]",
        tests=(MODELS,),
    ),
    Fault(
        name="a window is counted over gaps",
        path=PACKED + "layer.py",
        old="if bounds is not None and bounds.window_offset is not None and has_gaps(own):",
        new="if False:",
        tests=(MODELS,),
    ),
    Fault(
        name="a bias between positions is counted over gaps",
        path=PACKAGE + "integrations/transformers.py",
        old="    if mask.has_gaps:\n",
        new="    if False:\n",
        tests=(MODELS,),
    ),
    Fault(
        name="a classifier of rows reads padding",
        path=PACKAGE + "integrations/unpadded.py",
        old="if causal is not None and self.read is not None:",
        new="if False:",
        tests=(MODELS,),
    ),
    Fault(
        name="tokens that a layer carries outlive a change of its output",
        path=PACKED + "layer.py",
        old="return without_tokens(padded) if has_hooks(layer) else padded",
        new="return padded",
        tests=(CALLS,),
    ),
    Fault(
        name="tokens of a reentrant checkpoint have no history",
        path=PACKAGE + "layers/carried.py",
        old="return held.tokens if held.tokens.requires_grad == x.requires_grad else take(x, packing)",
        new="return held.tokens",
        tests=(CALLS,),
    ),
    Fault(
        name="a mask is dense in a reentrant checkpoint, and dropout another",
        path=PACKAGE + "integrations/lazy_mask.py",
        old="        if function is torch.ops.aten.detach.default:\n            return args[0].alias()\n",
        new="",
        tests=(CALLS,),
    ),
    Fault(
        name="a decoder attends to a source without tokens as to one of zeros",
        path=PACKAGE + "accelerate/patterns/without_padding.py",
        old="    if bool((own.cu_seqlens.diff() == 0).any()):  # a decoder may attend to a sequence without tokens\n"
        "        raise StaysPaddedError(NO_SOURCE)\n",
        new="",
        tests=(STACKS,),
    ),
    Fault(
        name="a dense mask of an encoder is padding whatever its rows say",
        path=PACKAGE + "models/packed.py",
        old="if torch.equal(keep, tokens.expand_as(keep)) or",
        new="if True or",
        tests=(STACKS,),
    ),
    Fault(
        name="a decoder's weights at padding are not 0",
        path=PACKAGE + "accelerate/patterns/attention.py",
        old="AttentionMask.keep(queries[:, None, :, None] & keys[:, None, None])",
        new="AttentionMask.keep(keys[:, None, None])",
        tests=(STACKS,),
    ),
    Fault(
        name="a look-ahead of torch's stacks is forgotten without padding",
        path=PACKAGE + "layers/torch_packed.py",
        old="mask, memory_mask = PackedMask(own, own, causal), PackedMask(own, source)",
        new="mask, memory_mask = PackedMask(own, own), PackedMask(own, source)",
        tests=(STACKS,),
    ),
    Fault(
        name="the last norm of torch's stacks runs on padding",
        path=PACKAGE + "layers/torch_packed.py",
        old="    tokens = tokens if stack.norm is None else stack.norm(tokens)  # type: ignore[operator]\n"
        "    return _batch_first(stack, unpack(tokens, packing))",
        new="    padded = unpack(tokens, packing)\n"
        "    return _batch_first(stack, padded if stack.norm is None else stack.norm(padded))",
        tests=(STACKS,),
    ),
    Fault(
        name="a model's output layer runs on padding",
        path=PACKED + "model.py",
        old="return base.forward(self, take(hidden, call.head).unsqueeze(0), *args, **kwargs)",
        new="return take(base.forward(self, hidden, *args, **kwargs), call.head).unsqueeze(0)",
        tests=(CALLS,),
    ),
    Fault(
        name="a layer that mixes tokens is not found out",
        path=PACKED + "trial.py",
        old="same = not bool(actual[~keep].any()) and _close(actual[keep], expected[keep])",
        new="same = True",
        tests=(CALLS,),
    ),
)
