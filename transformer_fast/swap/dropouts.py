"""Dropout of a module in a trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode


class HiddenDropoutError(ValueError):
    """Error for a probability of dropout that is no attribute of a module."""


class Dropouts:
    """Places of a module that hold a probability of dropout: (path of a module, name of its attribute).

    The places are ``nn.Dropout`` and its relatives, ``nn.MultiheadAttention``, and attributes whose value reaches
    ``F.dropout`` or ``F.scaled_dot_product_attention`` in a call.

    Args:
        module: module whose dropouts are set to 0.
        run: function that calls the module in training.

    Attributes:
        places: the places.
        of_features: True if whole features are dropped.

    Raises:
        HiddenDropoutError: if a probability is held elsewhere.
    """

    def __init__(self, module: nn.Module, run: Callable[[], Any]) -> None:
        with _Probabilities() as used:
            run()
        self.places = [
            (path, name)
            for path, part in module.named_modules()
            for name, value in vars(part).items()
            if (name == "p" and isinstance(part, nn.modules.dropout._DropoutNd))
            or (name == "dropout" and isinstance(part, nn.MultiheadAttention))
            or (type(value) is float and value in used.values)
        ]
        self.set_all(module, 0.0)
        with _Probabilities() as left:
            run()
        if left.values:
            raise HiddenDropoutError(
                f"dropout {left.values.pop()} is no attribute of a module; check with a module without it"
            )
        self.of_features = used.of_features

    def set_all(self, module: nn.Module, p: float) -> None:
        """Set all probabilities of a module or its copy."""
        for path, name in self.places:
            vars(module.get_submodule(path))[name] = p

    def drop(self, module: nn.Module, path: str, name: str) -> None:
        """Set one probability to 1."""
        vars(module.get_submodule(path))[name] = 1.0


class _Probabilities(TorchFunctionMode):
    """Probabilities of dropout in a block of code."""

    def __init__(self) -> None:
        super().__init__()
        self.values: set[float] = set()
        self.of_features = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            self._note(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
        elif "dropout" in name:
            found = (
                kwargs.get(key, args[place] if len(args) > place else None) for key, place in (("p", 1), ("train", 2))
            )
            p, train = found
            if kwargs.get("training", train) is not False:
                self._note(p)
            self.of_features |= name != "dropout"
        return func(*args, **kwargs)

    def _note(self, p: Any) -> None:
        if isinstance(p, float) and p != 0.0:
            self.values.add(p)
