"""Commits that repaired something, taken back one at a time."""

from .fault import Reverted

ROWS = (
    Reverted(
        commit="10dfc34",
        subject="loss: targets made in inference mode can be trained on",
        tests=(
            "tests/ops/test_cross_entropy_rows.py",
            "tests/ops/test_inference_mode.py",
        ),
    ),
    Reverted(
        commit="ddaa29d",
        subject="A NaN that a rule leaves out is an error with drafts, too",
        tests=("tests/generation/test_speculative.py",),
    ),
    Reverted(
        commit="4d1f4ca",
        subject="bfloat16 on an ARM CPU without oneDNN is said to be slow, not an error",
        tests=(
            "tests/translation/test_training.py",
            "tests/translation/test_learner.py",
        ),
    ),
    Reverted(
        commit="e480450",
        subject="A run with RMSNorm goes to CTranslate2; Marian's format refuses it",
        tests=("tests/translation/test_checkpoint_export.py",),
    ),
    Reverted(
        commit="081ec59",
        subject="A part around a refused model does not answer for its config",
        tests=("tests/accelerate/test_huggingface_attention.py",),
    ),
    Reverted(
        commit="86c039b",
        subject="Fused loss: a change of weights before a step is noticed too",
        tests=(
            "tests/accelerate/test_loss.py",
            "tests/accelerate/test_loss_graph.py",
        ),
    ),
    Reverted(
        commit="d297b24",
        subject="accelerate: tests of the blocks of ten models of transformers",
        tests=("tests/accelerate/test_huggingface_blocks.py",),
    ),
    Reverted(
        commit="eb6dc45",
        subject="Attention on CPU: slopes of a cap in tiles that are not computed",
        tests=("tests/ops/test_attention_parts.py",),
    ),
    Reverted(
        commit="7c28c31",
        subject="Products of at most one vector of columns are two sums, not one",
        tests=("tests/ops/test_attention_kernels.py", "tests/ops/test_attention_native.py"),
    ),
    Reverted(
        commit="6f152eb",
        subject="Translator: padding of an imported model is never said",
        tests=("tests/translation/test_marian.py",),
    ),
    Reverted(
        commit="e628226",
        subject="Import: settings of a wrong kind are named",
        tests=("tests/translation/test_marian_refusals.py",),
    ),
    Reverted(
        commit="a1060ab",
        subject="Triton attention: sums are taken again from a logsumexp of 8 on",
        tests=("tests/interpreter/test_attention_outputs.py",),
    ),
    Reverted(
        commit="e4ac19f",
        subject="Norms of two arguments keep their code",
        tests=("tests/accelerate/test_handwritten.py",),
        only=("transformer_fast/accelerate/patterns/norm.py",),
    ),
    Reverted(
        commit="39aa291",
        subject="Another torch, and missing extras: one line with all that is needed",
        tests=(
            "tests/ops/test_extension.py",
            "tests/ops/test_backends.py",
        ),
        only=("transformer_fast/backends.py",),
    ),
    Reverted(
        commit="4fe8e69",
        subject="backend triton leaves embedding to the extension",
        tests=("tests/ops/test_backends.py",),
        only=("transformer_fast/backends.py",),
    ),
    Reverted(
        commit="ac56f91",
        subject="vmap is refused by name at every door",
        tests=("tests/layers/test_multihead.py", "tests/ops/test_tensor_transforms.py"),
        only=(
            "transformer_fast/masks/packing.py",
            "transformer_fast/layers/torch_masks.py",
        ),
    ),
    Reverted(
        commit="ed29407",
        subject="forward-mode differentiation is refused where tangents were silently lost",
        tests=("tests/ops/test_compile.py",),
        only=("transformer_fast/backends.py",),
    ),
    Reverted(
        commit="edde0dc",
        subject="cli: recipes decide searches, finished runs and damage say more",
        tests=("tests/translation/test_translation_data.py",),
        only=("transformer_fast/translation/batching.py",),
    ),
)
