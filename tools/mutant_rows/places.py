"""Folders of the sources, and the tests that are most likely to see a fault, for several files of rows."""

ATTENTION = "csrc/cpu/attention/"
NATIVE = ("tests/ops/test_attention_native.py",)
PARTS = ("tests/ops/test_attention_parts.py",)
KERNELS = ("tests/ops/test_attention_kernels.py",)
OUTPUTS = ("tests/ops/test_attention_outputs.py",)
DECODE = ("tests/ops/test_attention_decode.py",)
NORM = ("tests/ops/test_norm.py", "tests/ops/test_every_op.py")
DROPOUT = ("tests/ops/test_dropout.py", "tests/ops/test_every_op.py")
EMBEDDING = ("tests/ops/test_embedding.py", "tests/ops/test_every_op.py")
LOSS = ("tests/ops/test_cross_entropy.py", "tests/ops/test_every_op.py")
SURE = ("tests/ops/test_cross_entropy_sure.py",)
TOPK = ("tests/generation/test_topk.py",)
PACKAGE = "transformer_fast/"
LOWER = ("tests/ops/test_lower.py",)
MASKS = ("tests/ops/test_masks.py",)
PACKING = ("tests/ops/test_packing.py",)
KINDS = ("tests/ops/test_tensor_kinds.py", "tests/ops/test_tensor_transforms.py")
EXPORT = ("tests/ops/test_export.py",)
SDPA = ("tests/ops/test_scaled_dot_product_attention.py",)
CHILDREN = ("tests/layers/test_children.py",)
TRANSFORMERS = ("tests/integrations/test_transformers.py",)
