"""``accelerate``: walk over a model, and swap its modules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from .. import backends, huggingface
from ..layers.devices import left_to_torch
from ..layers.linear import Linear
from ..ops.linear import is_faster
from ..ops.unknown_names import near
from ..ops.weight_layout import WeightLayout
from .attention_rows import attention_rows
from .check_form import difference
from .form_class import class_of_form
from .forms import FORMS
from .huggingface import give_attention
from .int8 import Int8, Plan
from .kept_weights import give_layout, takes_layout
from .measured import explained, measured
from .output_layer import NAME as FUSED_LOSS
from .output_layer import OutputLayer, Watching, output_layers
from .packed import pack
from .report import LOCK, Report
from .rows import ALREADY, OWN_FORWARD, Row
from .rules import SWAPS
from .swapped import FAST, IN_BLOCK, Registered, fast_class, functional_class, functional_obstacle

Function = TypeVar("Function", bound=Callable[..., Any])


def with_named_errors(function: Function) -> Function:
    """Decorate a function of one argument and keywords: an unknown keyword names the closest known one, and a flag must
    be a bool.

    Raises:
        TypeError: for a keyword that the function does not have, and for a value other than True or False of a keyword
            whose default is True or False.
    """
    first, *keywords = inspect.signature(function).parameters.values()
    defaults = {one.name: one.default for one in keywords}

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs.keys() - defaults.keys() - {first.name}:
            hint = near(name, list(defaults))
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}; {hint}")
        for name, value in kwargs.items():
            if isinstance(defaults.get(name), bool) and not isinstance(value, bool):
                raise TypeError(f"{function.__name__}: {name} must be True or False, got {value!r}")
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


OWN_SUM = "it adds 16-bit losses in their dtype, and float16 may overflow: fused_loss=True adds them in float32"
"""Reason to list PyTorch's loss."""


@with_named_errors
def accelerate(
    model: nn.Module,
    *,
    fused_loss: bool = False,
    packed: bool = False,
    keep_weights: bool = False,
    functional: bool = False,
    quantize: str | Int8 | None = None,
) -> Report:
    """Swap the fused ops into a model, in place.

    Modules of ``torch.nn`` (LayerNorm, RMSNorm, Embedding, Dropout, MultiheadAttention, TransformerEncoder,
    TransformerDecoder and their layers, and so ``nn.Transformer``) and hand-written modules with the structures of the
    classic texts get a new class. Parameters, buffers, state-dict keys, hooks, mode, dtype, device and optimizers stay,
    and masks keep the meaning that they have at each module. Modules of a class that was given to
    :func:`transformer_fast.register` get its fast class. A hand-written module is swapped only if its numbers agree
    with the fused op's on random input. Any other module keeps its code. Models of Hugging Face transformers get our
    attention, in copies of their configs, and keep their masks. Linear layers use the faster of PyTorch's matrix
    libraries. On a GPU, dropout alone stays torch's. Call ``accelerate`` before the model is compiled or sharded. A
    second call lists the modules that are swapped already, and swaps modules added since.

    Nothing outside the model changes: no default dtype, random state or backend, in any thread. Calls in several
    threads take turns. A call that ends with an exception (also KeyboardInterrupt) undoes its changes.

    Args:
        model: any module; the module itself may be swapped too.
        fused_loss: skip logits that only ``F.cross_entropy`` reads, in training on a CPU. The output layer then returns
            a subclass of Tensor, and every optimizer of the process has a hook before its step until the last such
            model is undone.
        packed: skip the padding of a batch. The layers of a model compute tokens only, and outputs are 0 at padding;
            see docs/packed.md.
        keep_weights: in evaluation without gradients, multiply with copies of the weights in the layout that the
            product reads fastest, instead of rearranging the weights in each call, on a CPU, in float32 and bfloat16.
            The copies are made by the first call and take the memory of the weights once more, in float32 once again
            if calls have both few rows and many. A weight that is written to gets a new copy; see docs/int8.md.
        functional: run the ``forward`` of each module that keeps its own code in a block of
            ``transformer_fast.functional()``: torch's functions that this code calls are ours.
        quantize: "int8", or an ``accelerate.Int8(...)`` with options: linear layers have int8 weights, in evaluation
            without gradients, in fp32 on a CPU; see docs/int8.md.

    Returns:
        A report to print: attention first, then modules by kind, with former class, new class, or the reason against a
        swap. ``report.undo()`` undoes all changes.

    Raises:
        TypeError: if ``model`` is not a module, a flag is no bool, or a keyword is unknown.
        ValueError: if the model cannot have int8 weights; the message has the reason.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
        >>> report = tfast.accelerate(model)
        >>> model.norm1.__class__
        <class 'transformer_fast.layers.torch_modules.LayerNorm'>
        >>> report.undo()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"accelerate: expected a torch.nn.Module, got {_instead_of_a_module(model)}")
    with LOCK:
        report = Report()
        try:
            plan = None if quantize is None else Plan(model, quantize, report)
            walk = _Walk(model, report, plan, output_layers(model) if fused_loss else set())
            walk.keep_weights, walk.functional, walk.packed = keep_weights, functional, packed
            if fused_loss:
                report._changes.append(Watching())
            walk.visit(model, "")
            report.attention = attention_rows(model, report.rows, walk.attention)
            if packed:
                pack(model, report, lambda attention: id(attention) in walk.attention.layers)
            if keep_weights:
                give_layout(model, report, WeightLayout(keep=True))
            if plan is not None:
                plan.apply()
            if outside := huggingface.note(model):
                report.notes.append(outside)
            if fused_loss and not walk.output_layers:
                report.notes.append("fused_loss: no output layer on a CPU was found")
            report._explain = functools.partial(_explain, model, packed)
            report._measure = functools.partial(measured, model, None if packed else _packed_also)
            order = {path: place for place, (path, _) in enumerate(model.named_modules())}
            report.rows.sort(key=lambda row: order[row.path])
            return report
        except BaseException:
            report.undo()
            raise


def _explain(model: nn.Module, packed: bool, batch: Any) -> str:
    if packed:
        return explained(model, batch)
    with LOCK:
        report = _packed_also(model)
        try:
            return f"with packed=True:\n{explained(model, batch)}"
        finally:
            report.undo()


def _packed_also(model: nn.Module) -> Report:
    """Report of a second call, which lets the stacks of an accelerated model skip padding, without a warning."""
    report = accelerate(model, packed=True)
    report.padded_calls.warns = False
    return report


class _Walk:
    keep_weights = functional = packed = False  # the arguments of accelerate

    def __init__(self, model: nn.Module, report: Report, plan: Plan | None, output_layers: set[int]) -> None:
        self.model, self.report, self.output_layers = model, report, output_layers
        self.tried: dict[Hashable, str] = {}  # differences of hand-written modules from their forms
        self.seen: set[int] = set()
        self.int8 = set() if plan is None else plan.inside
        # Modules that a class of this package computes without a call; in SWAPS are those that get such a class.
        ours = (m for m in model.modules() if type(m) in SWAPS or _is_ours(type(m)))
        self.applied = {id(child) for m in ours if not isinstance(m, huggingface.Fast) for child in m.children()}
        self.fused: set[int] = set()  # modules that run on the fused ops, swapped by this call or earlier
        parameter = next(model.parameters(), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device
        self.attention = give_attention(model, lambda part: self._device_obstacle(part, "attention"), report)
        report.rows.extend(self.attention.rows)

    def visit(self, module: nn.Module, path: str) -> None:
        if id(module) in self.seen:
            return
        self.seen.add(id(module))
        if isinstance(module, torch.jit.ScriptModule):
            self._leave(path, module, "it is compiled by torch.jit")
            return
        for name, child in module._modules.items():
            if child is not None:
                self.visit(child, f"{path}.{name}" if path else name)
        was = type(module)
        if id(module) in self.output_layers and was is not OutputLayer and not self._obstacle(module, "cross_entropy"):
            self._swap(path, module, OutputLayer, FUSED_LOSS)
        elif isinstance(module, Registered) or _is_ours(was):
            self._leave(path, module, ALREADY)
            self.fused.add(id(module))
        elif was in FAST:
            fast = FAST[was].now
            why = self._obstacle(module, "attention")
            self._swap(path, module, fast_class(was, fast), f"{_name(fast)} (registered)", why)  # type: ignore[arg-type]
        elif was is nn.Linear:
            faster = is_faster(module.weight) or (self.keep_weights and takes_layout(module))  # type: ignore[arg-type]
            faster = faster and id(module) not in self.applied and "forward" not in module.__dict__
            if faster or id(module) in self.int8:
                self._swap(path, module, Linear, "layers.Linear")
            else:
                self.report.plain["Linear"] += 1
        elif was in SWAPS:
            swap = SWAPS[was]
            why = swap.obstacle(module) or self._obstacle(module, swap.op)
            self._swap(path, module, swap.fast, f"layers.{swap.fast.__name__}", why)
        elif (small := huggingface.fast_class(was)) is not None:
            why = small.obstacle(module) or self._obstacle(module, "norm")
            self._swap(path, module, small, f"huggingface.{small.__bases__[0].__name__}", why)
        elif isinstance(module, tuple(SWAPS)) and parametrize.is_parametrized(module):
            self._leave(path, module, "its parameters are computed by parametrizations")
        elif was is nn.CrossEntropyLoss and self._sums_losses_in_16_bits():
            self._leave(path, module, OWN_SUM)
        elif was.__module__.startswith(("torch.nn.modules", "torch.nn.utils")):
            self.report.plain[was.__name__] += 1
        else:
            self._visit_other(path, module)

    def _sums_losses_in_16_bits(self) -> bool:
        """Return True if PyTorch sums the losses of the model's logits, in 16 bits, as it does on a CPU."""
        narrow = any(p.dtype in (torch.float16, torch.bfloat16) for p in self.model.parameters())
        return narrow and self.device.type == "cpu" and not self.output_layers

    def _visit_other(self, path: str, module: nn.Module) -> None:
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
            self._leave(path, module, "its sizes are not known before its first call")
            return
        containers = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict)
        of_torch = (base for base in type(module).__mro__ if base.__module__.startswith("torch.nn.modules"))
        family = next((base for base in of_torch if base not in containers), None)
        reason = f"a subclass of nn.{family.__name__} may compute something else" if family else OWN_FORWARD
        if module._modules:  # own code may do anything: name the module, count what is fused
            fused = len(self.fused.intersection(map(id, module.modules())))
            reason += f"; {fused} of the modules inside it run on the fused ops"
        of_transformers = type(module).__module__.startswith("transformers.")
        for form in () if of_transformers else FORMS.values():
            if not form.has_names(module):
                continue
            obstacle = form.obstacle(module) or self._obstacle(module, "attention")
            why = obstacle or difference(module, form, self.tried)
            if not why:
                self._swap(path, module, class_of_form(form, module), f"fused {form.name}")
                return
            if obstacle or not family:  # else it has these names from torch's class
                reason = why
        # Padding leaves at the door of a stack by its own class, so that must stay.
        functional = self.functional and not (self.packed and huggingface.is_packed(type(module)))
        if id(module) in self.attention.layers:
            self.fused.add(id(module))
        elif functional:
            why = functional_obstacle(module)
            made = type(module) if why else functional_class(type(module))  # type: ignore[arg-type]
            self._swap(path, module, made, IN_BLOCK, why)
        elif id(module) not in self.attention.parts:
            self._leave(path, module, reason)

    def _obstacle(self, module: nn.Module, op: str) -> str:
        if "forward" in module.__dict__ or type(module).__call__ is not nn.Module.__call__:
            return "its forward was replaced"
        return self._device_obstacle(module, op)

    def _device_obstacle(self, module: nn.Module, op: str) -> str:
        """Reason to keep torch's op on a module's device, or ""."""
        parameter = next(module.parameters(), None)
        device, dtype = (self.device, torch.float32) if parameter is None else (parameter.device, parameter.dtype)
        if reason := left_to_torch(op, device, module):
            return reason
        backend, why = backends.choose(op, device, dtype)
        return f"no kernel here: {why}" if backend == "reference" and backends.current() == "auto" else ""

    def _swap(self, path: str, module: nn.Module, fast: type[nn.Module], name: str, why: str = "") -> None:
        """Swap a module, unless there is a reason to leave it."""
        if why:
            self._leave(path, module, why)
            return
        self.report.rows.append(Row(path, _name(type(module)), name))
        self.report._give_class(module, fast)
        self.fused.add(id(module))

    def _leave(self, path: str, module: nn.Module, why: str) -> None:
        self.report.rows.append(Row(path, _name(type(module)), None, why))


def _instead_of_a_module(value: object) -> str:
    """Text: the value, and how it becomes a module."""
    if isinstance(value, type):
        return f"the class {value.__name__}: make a model of it first"
    if isinstance(value, str):
        return f"a str: load the model first, as by transformers' from_pretrained({value!r})"
    has_model = isinstance(getattr(value, "model", None), nn.Module)  # Trainer and pipeline of transformers
    return f"{type(value).__name__}" + (": pass its .model" if has_model else "")


def _is_ours(kind: type[nn.Module]) -> bool:
    """Return True for a module whose class in this package runs on the fused ops."""
    plain = ("transformer_fast.reference", "transformer_fast.translation")
    return kind.__module__.startswith("transformer_fast.") and not kind.__module__.startswith(plain)


def _name(kind: type[nn.Module]) -> str:
    return f"nn.{kind.__name__}" if kind.__module__.startswith("torch.nn.") else kind.__name__
