"""Errors of wrong keyword arguments that name the right one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ..ops.unknown_names import near

P, R = ParamSpec("P"), TypeVar("R")


def with_named_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function: an unknown keyword names the closest known one, and a flag must be a bool.

    Raises:
        TypeError: for a keyword that the function does not have, and for a value other than True or False of a keyword
            whose default is True or False.
    """
    parameters = inspect.signature(function).parameters
    keywords = [name for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY]
    flags = [name for name in keywords if isinstance(parameters[name].default, bool)]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() - parameters.keys():
            hint = near(name, keywords)
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}; {hint}")
        for name in flags:
            if not isinstance(value := kwargs.get(name, False), bool):
                raise TypeError(f"{function.__name__}: {name} must be True or False, got {value!r}")
        return function(*args, **kwargs)

    return checked
