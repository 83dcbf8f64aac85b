"""A fixed part of the random calls of tests/fuzz/fuzz.py on the C++ kernels; tests/interpreter runs them on Triton."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import fuzz


@pytest.mark.parametrize("program", ["fuzz", "fuzz_arguments", "fuzz_generation"])
def test_the_program_runs_by_itself(program):
    """``make fuzz`` starts the program without pytest's paths."""
    root = Path(__file__).parents[2]
    plain = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
    command = [sys.executable, "-m", f"tests.fuzz.{program}", "--count", "1"]
    done = subprocess.run(command, cwd=root, env=plain, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", range(75))
def test_a_random_call(number):
    backend = "native" if fuzz.DEVICE.type == "cpu" else "triton"
    fuzz.check(fuzz.config(1, number, backend), backend)


@pytest.mark.parametrize("bias", ("none", "learned"))
def test_every_combination_of_mask_parts(bias):
    backend = "native" if fuzz.DEVICE.type == "cpu" else "triton"
    for c in fuzz.combinations():
        if c.bias == bias:
            fuzz.check(c, backend)


def test_a_configuration_is_a_function_of_seed_and_number():
    assert fuzz.config(3, 17) == fuzz.config(3, 17) != fuzz.config(4, 17)
    kinds = {fuzz.config(1, number).kind for number in range(75)}
    assert kinds == {"padded", "packed", "decode"}


FEW_QUERIES = {
    # Weights: one long sum over D rounded more than the many short ones of a matrix-vector product.
    "weights": {"D": 80, "Dv": 12, "H": 3, "Hkv": 3, "outputs": "weights", "scale": 0.5},
    # Gradient of the bias: scores were added up in another order than in the forward, and missed its logsumexp.
    "grad_bias": {
        "D": 128,
        "Dv": 128,
        "H": 6,
        "Hkv": 3,
        "parts": ("dense", "lengths"),
        "bias": "learned",
        "scale": 1.0,
    },
}


@pytest.mark.parametrize("what", FEW_QUERIES)
@pytest.mark.parametrize("number", (3, 1090, 1879))
def test_few_queries_with_large_scores(what, number):
    """Found by fuzzing: two queries and 65 keys, which is more than one tile."""
    backend = "native" if fuzz.DEVICE.type == "cpu" else "triton"
    plain = {"parts": (), "causal": 0, "bias": "none", "dropout_p": 0.1, "empty_rows": "zero", "outputs": "out"}
    shape = {"kind": "padded", "B": 3, "Lq": 2, "Lk": 65, "dtype": "fp32"}
    looks = {"layout": "one head for all", "dialect": "keep", "window": (None, None, 0)}
    fuzz.check(fuzz.Config(number=number, **(plain | shape | looks | FEW_QUERIES[what])), backend)


def test_some_queries_with_large_scores():
    """Found by fuzzing: scores of three queries were one long sum over D, with 2.1 times eager's error."""
    backend = "native" if fuzz.DEVICE.type == "cpu" else "triton"
    shape = {"kind": "decode", "B": 1, "H": 6, "Hkv": 3, "Lq": 3, "Lk": 31, "D": 128, "Dv": 128, "dtype": "fp32"}
    masks = {"parts": ("window", "documents"), "causal": 0, "window": (128, 0, 0), "documents": 50, "offset": -13}
    plain = {"bias": "none", "dropout_p": 0.0, "empty_rows": "zero", "outputs": "out", "scale": -0.3, "softcap": None}
    fuzz.check(fuzz.Config(number=726, layout="sliced", dialect="blocked", **shape, **masks, **plain), backend)
