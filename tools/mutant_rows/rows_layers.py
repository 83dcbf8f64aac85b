"""Faults in layers, dialects and integrations."""

from .fault import Fault

PACKAGE = "transformer_fast/"
MASKS = ("tests/ops/test_masks.py",)
PACKING = ("tests/ops/test_packing.py",)
KINDS = ("tests/ops/test_tensor_kinds.py", "tests/ops/test_tensor_transforms.py")
EXPORT = ("tests/ops/test_export.py",)
SDPA = ("tests/ops/test_scaled_dot_product_attention.py",)
PARTS = ("tests/ops/test_attention_parts.py",)
CHILDREN = ("tests/layers/test_children.py",)
TRANSFORMERS = ("tests/integrations/test_transformers.py",)

ROWS = (
    Fault(
        name="a module with a backward hook is computed without it",
        path=PACKAGE + "layers/hooks.py",
        old="or module._backward_hooks or module._backward_pre_hooks",
        new="or module._backward_pre_hooks",
        tests=CHILDREN,
    ),
    Fault(
        name="global hooks of modules are not called",
        path=PACKAGE + "layers/hooks.py",
        old="if module._compiled_call_impl is not None or _module._has_any_global_hook():",
        new="if module._compiled_call_impl is not None:",
        tests=CHILDREN,
    ),
    Fault(
        name="a subclass counts as its base",
        path=PACKAGE + "layers/hooks.py",
        old="if (kinds and type(module) not in kinds)",
        new="if (kinds and not isinstance(module, kinds))",
        tests=CHILDREN,
    ),
    Fault(
        name="subclasses inherit a role",
        path=PACKAGE + "layers/hooks.py",
        old="return getattr(type(module), role, None) is type(module) and is_plain(module)",
        new="return getattr(type(module), role, None) is not None and is_plain(module)",
        tests=CHILDREN,
    ),
    Fault(
        name="a module that was compiled in place is computed without its code",
        path=PACKAGE + "layers/hooks.py",
        old="if module._compiled_call_impl is not None or _module",
        new="if _module",
        tests=CHILDREN,
    ),
    Fault(
        name="an embedding with max_norm is read without calling it",
        path=PACKAGE + "layers/embedding.py",
        old="return module.max_norm is None and not module.sparse",
        new="return not module.sparse",
        tests=("tests/layers/test_layers.py", "tests/layers/test_children.py"),
    ),
    Fault(
        name="positions beyond the stored table begin anew",
        path=PACKAGE + "layers/embedding.py",
        old="layout=self.layout)[stored.shape[0] :]",
        new="layout=self.layout)[: stored.shape[0]]",
        tests=("tests/layers/test_layers.py",),
    ),
    Fault(
        name="dropout of a layer acts in evaluation, too",
        path=PACKAGE + "layers/dropout.py",
        old="return module.p if module.training else 0.0",
        new="return module.p",
        tests=("tests/layers/test_layers.py",),
    ),
    Fault(
        name="a residual is added before a child that is called",
        path=PACKAGE + "layers/dropout.py",
        old="    x = drop(x)\n    return x if residual is None else residual + x",
        new="    x = x if residual is None else residual + x\n    return drop(x)",
        tests=CHILDREN,
    ),
    Fault(
        name="packed attention by modules forgets the window",
        path=PACKAGE + "layers/attention.py",
        old="        allowed = allowed & mask.window\n",
        new="        allowed = allowed\n",
        tests=("tests/layers/test_packed_model.py", "tests/layers/test_children.py"),
    ),
    Fault(
        name="a padding mask of torch.nn is a keep mask",
        path=PACKAGE + "layers/torch_masks.py",
        old="AttentionMask(keys.keep_mask, ~key_padding_mask,",
        new="AttentionMask(keys.keep_mask, key_padding_mask,",
        tests=("tests/layers/test_multihead.py",),
    ),
    Fault(
        name="a look-ahead mask that is learned is taken for the constant one",
        path=PACKAGE + "layers/torch_masks.py",
        old="or mask.shape[0] != mask.shape[1] or mask.requires_grad:",
        new="or mask.shape[0] != mask.shape[1]:",
        tests=("tests/layers/test_multihead.py", "tests/accelerate/test_torch.py"),
    ),
    Fault(
        name="weights of torch.nn's attention are always one mean over the heads",
        path=PACKAGE + "layers/torch_modules.py",
        old="if weights is not None and average_attn_weights:",
        new="if weights is not None:",
        tests=("tests/layers/test_multihead.py", "tests/accelerate/test_huggingface_attention.py"),
    ),
    Fault(
        name="TensorFlow's padding mask is 1 at tokens",
        path=PACKAGE + "dialects/tensorflow/masks_and_positions.py",
        old="return (ids == 0).float()[:, None, None]",
        new="return (ids != 0).float()[:, None, None]",
        tests=("tests/layers/test_dialects_tensorflow.py",),
    ),
    Fault(
        name="TensorFlow's look-ahead mask blocks the query's own key",
        path=PACKAGE + "dialects/tensorflow/masks_and_positions.py",
        old="torch.ones(size, size, device=device).triu(1)",
        new="torch.ones(size, size, device=device).triu(0)",
        tests=("tests/layers/test_dialects_tensorflow.py",),
    ),
    Fault(
        name="d2l's decoder looks ahead in training",
        path=PACKAGE + "dialects/d2l/blocks.py",
        old="mask = AttentionMask.causal()  # lengths",
        new="mask = None  # lengths",
        tests=("tests/layers/test_dialects_d2l.py",),
    ),
    Fault(
        name="d2l's decoder counts positions anew at each step",
        path=PACKAGE + "dialects/d2l/models.py",
        old="X = self.embedded(X, offset=seen)",
        new="X = self.embedded(X)",
        tests=("tests/layers/test_dialects_d2l.py",),
    ),
    Fault(
        name="BERT's attention has another mask than its scores' rank says",
        path=PACKAGE + "dialects/_common.py",
        old="return mask.unsqueeze(1) if axes == 3 == mask.dim() else mask",
        new="return mask",
        tests=("tests/layers/test_dialects_bert.py", "tests/layers/test_dialects_tensorflow.py"),
    ),
    Fault(
        name="transformers' mask is ignored",
        path=PACKAGE + "integrations/transformers.py",
        old="    return AttentionMask.keep(mask), None\n",
        new="    return None, None\n",
        tests=TRANSFORMERS,
    ),
    Fault(
        name="transformers' padding is left out of the mask in normal form",
        path=PACKAGE + "integrations/transformers.py",
        old="        if not keys.all():\n",
        new="        if not keys.any():\n",
        tests=TRANSFORMERS,
    ),
    Fault(
        name="a decoder of transformers looks ahead where its layer alone says causal",
        path=PACKAGE + "integrations/transformers.py",
        old="mask = AttentionMask.causal() if is_causal else mask",
        new="mask = AttentionMask.causal() if is_causal and False else mask",
        tests=TRANSFORMERS,
    ),
    Fault(
        name="the sinks of GPT-OSS are left out",
        path=PACKAGE + "integrations/transformers.py",
        old='"softcap": softcap, "sinks": s_aux,',
        new='"softcap": softcap,',
        tests=TRANSFORMERS,
    ),
    Fault(
        name="a sliding window of transformers has one key more",
        path=PACKAGE + "integrations/lazy_mask.py",
        old='return given["sliding_window"] - 1, None',
        new='return given["sliding_window"], None',
        tests=TRANSFORMERS,
    ),
)
