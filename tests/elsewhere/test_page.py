"""docs/elsewhere.md: the page is that of the committed answers, the row of this package is still true, and rows about
guesses have tests."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.elsewhere import __main__ as command
from benchmarks.elsewhere import page

ANSWERS: dict[str, list[dict[str, Any]]] = json.loads(page.ANSWERS.read_text())
TESTS = Path(__file__).parents[1]
GUESSES = TESTS.parent / "findings/guesses.md"
HELD: dict[str, tuple[str, ...]] = {
    "PyTorch 2.13 on a CPU joins a mask": (
        "ops/test_scaled_dot_product_attention.py::test_a_mask_and_is_causal",
        "elsewhere/test_calls.py::test_attention_joins_a_mask_and_causal",
    ),
    "`is_causal=True` without a mask": ("accelerate/test_torch_modes.py::test_a_hint_without_a_mask",),
    "`is_causal` with a negative scale": ("elsewhere/test_calls.py::test_causal_with_a_scale_that_is_not_positive",),
    "a query without keys on a GPU": (
        "interpreter/test_scaled_dot_product_attention.py::test_as_torch_computes",
        "ops/test_attention_kernels.py::test_blocked_and_huge_entries_of_a_bias",
    ),
    "`nn.MultiheadAttention` in eval": ("accelerate/test_torch_modes.py::test_a_sentence_that_is_all_padding",),
    "the fast path of": (
        "accelerate/test_torch_modes.py::test_the_form_of_gelu",
        "elsewhere/test_replaced_parts.py::test_adapters_of_peft",
        "elsewhere/test_replaced_parts.py::test_a_part_that_was_there_before",
        "elsewhere/test_replaced_parts.py::test_a_part_that_comes_afterwards",
    ),
    "an adapter on `out_proj`": (
        "elsewhere/test_replaced_parts.py::test_an_adapter_of_the_output_projection_is_never_applied",
    ),
    "`CrossEntropyLoss` where all targets": (
        "ops/test_cross_entropy.py::test_all_ignored_and_no_rows",
        "accelerate/test_loss.py::test_all_ignored",
    ),
    "`nn.Embedding(max_norm=...)`": ("elsewhere/test_calls.py::test_a_table_with_a_greatest_norm",),
    "an autocast region": ("elsewhere/test_autocast.py::test_an_accelerated_model_reads_what_the_plain_one_reads",),
    "an exported query without keys": (
        "elsewhere/test_rows_without_keys.py::test_in_graphs_of_onnx",
        "elsewhere/test_rows_without_keys.py::test_in_openvino",
    ),
    "an encoder layer with a padding mask": (
        "elsewhere/test_rows_without_keys.py::test_an_encoder_layer_in_graphs_of_onnx",
    ),
    "two float16 masks": ("elsewhere/test_rows_without_keys.py::test_two_masks_of_float16_whose_sum_is_not_finite",),
    "`openvino.save_model`": ("elsewhere/test_rows_without_keys.py::test_in_openvino",),
    "a tied table": ("elsewhere/test_tied_tables.py::test_an_accelerated_model_is_stored_as_the_plain_one",),
    "`quantize_dynamic` of": ("accelerate/test_quantised.py::test_as_many_layers_are_quantised",),
    "T5 and Marian": ("elsewhere/test_rows_without_keys.py::test_the_first_position_of_a_decoder",),
    "BERT with eager attention": (
        "elsewhere/test_rows_without_keys.py::test_a_mask_of_four_axes_with_an_empty_row",
        "elsewhere/test_rows_without_keys.py::test_a_bool_mask_of_four_axes_keeps_where_it_is_true",
    ),
    "a flattened batch": (
        "integrations/test_flattened.py::test_a_flattened_batch_equals_each_sentence_alone",
        "integrations/test_flattened.py::test_what_cannot_be_is_refused_by_name",
    ),
    "Trainer multiplies": (
        "accelerate/test_trainer_accumulation.py::test_accelerated_models_do_the_same_and_the_setting_of_the_page_helps",
    ),
    "Trainer decays": ("elsewhere/test_calls.py::test_trainer_decays_the_same_parameters",),
    "a Marian or BART model": (
        "translation/test_marian_refusals.py::test_a_wrong_folder_is_named_and_nothing_is_written",
        "translation/test_checkpoint_export.py::test_transformers_says_the_same",
    ),
    "a repetition penalty": (
        "translation/test_marian_refusals.py::test_a_wrong_folder_is_named_and_nothing_is_written",
    ),
    "CTranslate2's scores": ("translation/test_checkpoint_export.py::test_scores_of_ctranslate2",),
    "its converter": ("translation/test_checkpoint_export.py::test_scores_of_ctranslate2",),
    "PyTorch 2.11 says": (
        "ops/test_linear_compiled.py::test_a_compiler_that_says_it_exports_gets_the_op",
        "ops/test_linear_compiled.py::test_three_products_go_to_the_op_and_are_those_of_eager_code",
    ),
    "eager and sdpa attention": (
        "ops/test_every_op.py::test_manual_seed_governs_the_dropout_of_every_backend",
        "ops/test_scaled_dot_product_attention.py::test_the_seed_of_torch_governs_dropout",
    ),
    "a row of `F.linear`": ("elsewhere/test_calls.py::test_a_row_of_an_int8_layer_depends_on_no_other",),
    "AdamW decays": ("elsewhere/test_calls.py::test_what_has_no_gradient_has_none",),
    "norms take float32": ("elsewhere/test_calls.py::test_norms_keep_the_dtype_of_the_plain_ones",),
    "LayerNorm of values": ("ops/test_norm.py::test_a_large_offset_costs_no_accuracy",),
    "SDPA of jagged": (
        "elsewhere/test_calls.py::test_layers_take_jagged_tensors_as_torch_does",
        "elsewhere/test_calls.py::test_attention_of_jagged_tensors_is_that_of_torch",
    ),
    "the gradient of q": ("ops/test_every_op.py::test_two_runs_agree_bit_for_bit_on_any_number_of_threads",),
    "peft's adapter or copy of `shared`": (
        "elsewhere/test_replaced_parts.py::test_a_table_of_an_encoder_and_a_decoder",
    ),
    "`F.linear` in float32": (
        "accelerate/test_kept_weights.py::test_as_exact_as_the_plain_model",
        "accelerate/test_kept_weights.py::test_every_weight_has_a_copy",
    ),
}
"""Tests of what happens here, by the first words of a row about a guess."""
AGAIN = "python -m benchmarks.elsewhere --page"


def test_the_page_has_the_answers() -> None:
    assert page.PAGE.read_text() == page.text(), f"{AGAIN} writes the page"


def test_this_package_answers_as_the_page_says() -> None:
    assert command.asked("ours", sys.executable) == ANSWERS["ours"], "python -m benchmarks.elsewhere ours"


@pytest.mark.parametrize("name", command.PACKAGES)
def test_a_probe_ran_with_the_pinned_packages(name: str) -> None:
    """A version that was raised without a run, or a probe without answers, is a page that says what nobody saw."""
    assert (command.PROBES / f"{name}.py").exists()
    pinned = {p.replace("-cpu", "") for p in command.PACKAGES[name]}
    for row in ANSWERS[name]:
        versions = [v.replace(" ", "==") for v in row["version"].split(", ") if " " in v]
        assert set(versions) <= pinned and (versions or name == "ours")


def test_every_probe_is_in_the_list() -> None:
    found = {path.stem for path in command.PROBES.glob("*.py")} - {"shared"}
    assert found == set(command.PACKAGES) == set(ANSWERS)


def test_each_row_about_a_guess_has_tests() -> None:
    table = page.PAGE.read_text().partition("| | in the library | here |\n| --- | --- | --- |\n")[2]
    for number, (words, row) in enumerate(zip(HELD, table.splitlines(), strict=True), 1):
        assert row.startswith(f"| {number} | {words}")


def test_each_guess_that_missed_has_its_row() -> None:
    """A dash is for what no part of this package touches."""
    named = set()
    for line in GUESSES.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 8 and cells[4] in ("yes", "no", "half"):
            assert cells[4] == "yes" or cells[5], line
            named |= {*cells[5].split(", ")} - {"", "-"}
    assert named == {str(number) for number, _ in enumerate(HELD, 1)}


@pytest.mark.parametrize("test", sorted({test for tests in HELD.values() for test in tests}))
def test_a_test_of_a_row_is_there(test: str) -> None:
    file, _, name = test.partition("::")
    parsed = ast.parse((TESTS / file).read_text())
    assert name in {node.name for node in parsed.body if isinstance(node, ast.FunctionDef)}
