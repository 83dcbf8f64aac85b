"""Products with int8 weights, in evaluation on a CPU, for layers that ``accelerate(quantize="int8")`` gave the layout.

The int8 copy of a weight is kept on the parameter (`tensor_cache.py`) and made anew after a change of the weight. If
the weights are freed, the layer holds the only copy, and its parameters are on the meta device, without memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._dynamo import eval_frame

from ..ops.weight_layout import FREED
from ..tensor_cache import get_or_compute, stamp_of
from ..tracing import is_traced

INT8_COPY = ("int8",)
"""Key of the int8 copies on a parameter."""


def int8_product(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none") -> Tensor:
    """Compute ``activation(x weight^T + bias)`` as `reference.quantized_linear` says.

    Args:
        module: the layer.
        x: (..., in), fp32 on a CPU.
        weight: a parameter (out, in) of the layer, or rows of one.
        bias: (out,) or None.
        activation: "none", "relu", "gelu" or "gelu_tanh".

    Returns:
        (..., out), fp32.

    Raises:
        RuntimeError: in training mode, if a gradient is needed, under autocast, in an exported or traced call, and for
            weights or an input that are not fp32 on a CPU, and for an input of another width.
    """
    if reason := _obstacle(module, x, weight):
        raise RuntimeError(f'accelerate(quantize="int8"): {reason}')
    freed = module.__dict__.get(FREED)
    packed = freed.of(module, weight) if freed is not None and weight.is_meta else kept_int8(weight)
    inputs = weight.shape[1]
    if x.shape[-1:] != (inputs,):  # the layout is rounded up to whole words, so the op cannot tell
        raise RuntimeError(f"int8 layers: x must be of shape (..., {inputs}), got {tuple(x.shape)}")
    return torch.ops.transformer_fast.packed_linear(x, packed, bias, weight.shape[0], activation)


# As torch.compiler.disable does, without importing the compiler: a cache is no part of a graph. The last line is for
# calls from code that is not compiled, and for the functions that are called inside.
int8_product._torchdynamo_disable = True  # type: ignore[attr-defined]
int8_product._torchdynamo_disable_msg = "int8 layers cannot be exported or traced"  # type: ignore[attr-defined]
_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
eval_frame.set_code_exec_strategy(int8_product.__code__, _SKIP)


def _obstacle(module: nn.Module, x: Tensor, weight: Tensor) -> str:
    if module.training:
        return "int8 layers are for evaluation, and the model is in training mode: call model.eval() first"
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return (
            "int8 layers have no gradients, and this call needs some: call the model inside torch.inference_mode() or "
            "torch.no_grad()"
        )
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on, which chooses another dtype for linear layers: leave the autocast block"
    if torch.compiler.is_exporting() or is_traced():
        return "int8 layers cannot be exported or traced: call report.undo() before"
    if type(x) is not Tensor:
        return f"int8 layers take plain tensors, got a {type(x).__name__}"
    for t in (x, weight):
        if t.dtype != torch.float32 or not (t.is_cpu or (t.is_meta and t is not x)):
            return f"int8 layers need fp32 weights and inputs on a CPU, got {t.dtype} on {t.device}"
    return ""


def kept_int8(weight: Tensor) -> Tensor:
    """Int8 copy of a weight that is a parameter, or rows of one."""
    return get_or_compute(weight, INT8_COPY, (), lambda: pack(weight), stamp_of(weight))


class FreedWeights:
    """Int8 weights of a layer whose fp32 weights are freed. A parameter that is assigned later is used itself.

    Attributes:
        packed: weights by the parameter's name, in the layout of the kernel.
        inputs: number of inputs by the parameter's name.
    """

    def __init__(self, packed: dict[str, Tensor], inputs: dict[str, int]) -> None:
        self.packed, self.inputs = packed, inputs

    def of(self, module: nn.Module, weight: Tensor) -> Tensor:
        """Weight for a parameter of the layer, or for whole panels of its rows."""
        whole = weight if weight._base is None else weight._base
        name = next(name for name in self.packed if module.get_parameter(name) is whole)
        packed = self.packed[name]
        if whole is weight:
            return packed
        first = weight.storage_offset() // weight.shape[1]
        panel = packed.shape[2]
        return packed[first // panel : (first + weight.shape[0]) // panel]

    def __reduce__(self) -> tuple[Any, ...]:
        """The layout depends on the vector unit, so a pickle has the rows."""
        return _from_rows, ({name: rows_of(packed, self.inputs[name]) for name, packed in self.packed.items()},)


def can_free(weight: Tensor, parts: int) -> bool:
    """Return True if equal parts of a weight's rows are whole panels."""
    return parts == 1 or weight.shape[0] // parts % pack(torch.zeros(1, 1)).shape[2] == 0


def free_weights(module: nn.Module, names: tuple[str, ...]) -> None:
    """Free the weights of a layer. Those in a state dict are then the int8 weights times their scales."""
    weights = {name: module.get_parameter(name) for name in names}
    packed = {name: pack(weight) for name, weight in weights.items()}
    module.__dict__[FREED] = FreedWeights(packed, {name: weight.shape[1] for name, weight in weights.items()})
    for name, weight in weights.items():
        path, _, own = name.rpartition(".")
        hollow = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
        module.get_submodule(path)._parameters[own] = hollow
    module._register_state_dict_hook(_put_weights)
    module.register_load_state_dict_pre_hook(_take_weights)


def pack(weight: Tensor) -> Tensor:
    """Quantise a weight (out, in) to the layout of the kernel."""
    return torch.ops.transformer_fast.pack_weight([weight.detach()], True)


def rows_of(packed: Tensor, inputs: int) -> tuple[Tensor, Tensor]:
    """Unpack a weight to rows, int8 (outputs, inputs), and their scales, fp32 (outputs,). The number of outputs is
    rounded up to a whole panel by rows of zeros."""
    words = packed.permute(0, 2, 1, 3)  # (panels, outputs of a panel, words of an output, bytes)
    scale = words[:, :, 0].contiguous().view(torch.float32).reshape(-1)
    q = _signs_moved(words[:, :, 2:], 1).reshape(len(scale), -1)
    return q[:, :inputs].clone(), scale


def packed_of(q: Tensor, scale: Tensor) -> Tensor:
    """Pack rows: the inverse of :func:`rows_of`."""
    _, words_of_output, panel, _ = pack(torch.zeros(1, q.shape[1])).shape
    missing = -len(q) % panel
    q = F.pad(q, (0, 4 * (words_of_output - 2) - q.shape[1], 0, missing))
    scale = F.pad(scale, (0, missing))
    sums = q.sum(dim=1, dtype=torch.int32)
    header = torch.stack([scale.view(torch.int32), sums], dim=1).view(torch.int8).view(len(q), 2, 4)
    words = torch.cat([header, _signs_moved(q.view(len(q), -1, 4), -1)], dim=1)
    return words.view(-1, panel, *words.shape[1:]).permute(0, 2, 1, 3).contiguous()


def _signs_moved(words: Tensor, sign: int) -> Tensor:
    """Without VNNI, a pair of bytes is stored as one sum, even + 256 odd: add the sign of even bytes to odd ones."""
    if pack(torch.tensor([[-1.0, 1.0]]))[0, 2, 0, 1] == 127:
        return words
    pairs = words.unflatten(-1, (2, 2))
    even, odd = pairs.unbind(-1)
    return torch.stack([even, odd + sign * (even < 0).to(torch.int8)], dim=-1).flatten(-2)


def _from_rows(rows: dict[str, tuple[Tensor, Tensor]]) -> FreedWeights:
    inputs = {name: q.shape[1] for name, (q, _) in rows.items()}
    return FreedWeights({name: packed_of(*of) for name, of in rows.items()}, inputs)


def _put_weights(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Put the values of freed weights in a state dict."""
    freed = module.__dict__[FREED]
    for name, packed in freed.packed.items():
        if prefix + name in state and state[prefix + name].is_meta:
            q, scale = rows_of(packed, freed.inputs[name])
            state[prefix + name] = (q * scale[:, None])[: len(module.get_parameter(name))]


def _take_weights(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Quantise weights of a state dict that is loaded."""
    freed = module.__dict__[FREED]
    for name in freed.packed:
        given, hollow = state.get(prefix + name), module.get_parameter(name)
        if given is not None and hollow.is_meta and given.shape == hollow.shape:  # else nn.Module says what is wrong
            freed.packed[name] = pack(given.float())
            state[prefix + name] = hollow
