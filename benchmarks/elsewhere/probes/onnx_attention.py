"""The operator Attention of ONNX, by onnxruntime and by the reference of the onnx package."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
import onnx
import onnxruntime
import shared
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

OPSET = 23
TYPES = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.bool_): TensorProto.BOOL}
Array = np.ndarray


def operator(reference: bool, **attributes: Any) -> Any:
    """Return a function that runs the operator; a mask is its fourth input."""

    def attend(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        given = {"q": q, "k": k, "v": v} | ({} if mask is None else {"mask": mask})
        node = helper.make_node("Attention", list(given), ["out"], **attributes)
        values = [helper.make_tensor_value_info(n, TYPES[a.dtype], list(a.shape)) for n, a in given.items()]
        out = helper.make_tensor_value_info("out", TensorProto.FLOAT, list(q.shape))
        graph = helper.make_graph([node], "attention", values, [out])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
        onnx.checker.check_model(model)
        if reference:
            return ReferenceEvaluator(model).run(None, given)[0]
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return session.run(None, given)[0]

    return attend


def row(reference: bool) -> dict[str, str]:
    """Return the cells of a runtime."""
    plain = operator(reference)
    return {
        "empty": f"{shared.row_without_keys(plain)}; float -inf: {shared.minus_infinity(plain)}",
        "mask": shared.meanings(plain),
        "causal": shared.causal(operator(reference, is_causal=1)),
        "dropout": "no attribute",
    }


names = {"onnxruntime": False, "onnx": True}
for name, reference in names.items():
    what = "onnx.reference" if reference else name
    shared.emit({f"ONNX `Attention`, opset {OPSET}, {what}": row(reference)}, f"{name} {version(name)}")
