"""Faults in models without padding."""

from .fault import Fault
from .places import PACKAGE

PACKED = PACKAGE + "accelerate/packed/"
CALLS, MODELS, STACKS, USERS, GRADIENTS = (
    f"tests/accelerate/test_packed_{name}.py" for name in ("calls", "transformers", "stacks", "users", "gradients")
)

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
        old="if _reads_padding(labels != IGNORED, keep, shifts) or unclear:",
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
        name="a hook reads zeros at padding",
        path=PACKED + "watch.py",
        old="if module is not model and has_hooks(module):",
        new="if False:",
        tests=(USERS,),
    ),
    Fault(
        name="a module that was replaced outside the layers is not seen",
        path=PACKED + "watch.py",
        old='            if tuple(own["_modules"].values()) != children:\n                return None\n',
        new="",
        tests=(USERS,),
    ),
    Fault(
        name="a layer that was changed since its trial skips padding",
        path=PACKED + "watch.py",
        old="if replaced or not _runs_as_packed(layer) or not layer.__dict__[JUDGED].fits():",
        new="if replaced or not _runs_as_packed(layer):",
        tests=(USERS,),
    ),
    Fault(
        name="a derived class is known by the class that it extends",
        path=PACKED + "origin.py",
        old="return None if replaced else held",
        new="return held",
        tests=(USERS,),
    ),
    Fault(
        name="a module around a model gets zeros at padding",
        path=PACKED + "walk.py",
        old="_change(report, module, AROUND, around_of(path, model))",
        new='_change(report, module, AROUND, "")',
        tests=(USERS,),
    ),
    Fault(
        name="a loss of a user's own reads zeros at padding",
        path=PACKED + "model.py",
        old="if model.loss_function is (loss := getattr(losses, name))",
        new="if (loss := getattr(losses, name))",
        tests=(USERS,),
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
        name="tokens that a layer carries are not a function of its output",
        path=PACKAGE + "layers/carried.py",
        old="    return _Take.apply(x, held)",
        new="    return held.tokens.requires_grad_()",
        tests=(GRADIENTS,),
    ),
    Fault(
        name="the loss is not a function of the logits that a model returns",
        path=PACKED + "logits.py",
        old="self._linked = padded, _Take.apply(padded, (tokens.detach(), self.packing)).unsqueeze(0)",
        new="self._linked = padded, tokens.unsqueeze(0)",
        tests=(GRADIENTS,),
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
        old="        call.head_was_called = True\n",
        new="        return base.forward(self, hidden, *args, **kwargs)\n",
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
