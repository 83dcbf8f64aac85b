"""OpenVINO's operator for attention on a CPU, in float32."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
import openvino
import openvino.opset13 as ops
import shared

CORE = openvino.Core()
Array = np.ndarray


def operator(causal: bool = False) -> Any:
    """Return a function that compiles the operator for its inputs, and runs it."""

    def attend(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        given = [q, k, v] if mask is None else [q, k, v, mask]
        places = [ops.parameter(a.shape, a.dtype) for a in given]
        node = ops.scaled_dot_product_attention(*places, causal=causal)
        model = CORE.compile_model(openvino.Model([node], places), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        return model(given)[0]

    return attend


rows = {
    "OpenVINO `scaled_dot_product_attention`": {
        "empty": f"{shared.row_without_keys(operator())}; float -inf: {shared.minus_infinity(operator())}",
        "mask": shared.meanings(operator()),
        "causal": shared.causal(operator(causal=True)),
        "dropout": "no argument",
    }
}
shared.emit(rows, f"openvino {version('openvino')}")
