"""Old paths of moved modules still work and name the new path."""

from __future__ import annotations

import importlib
import sys

import pytest

import transformer_fast as tfast
from transformer_fast._moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_is_the_module_of_the_new_one(old: str) -> None:
    path = f"transformer_fast.{old}"
    sys.modules.pop(path, None)
    with pytest.warns(DeprecationWarning, match=f"{path} is transformer_fast.{MOVED[old]} now"):
        found = importlib.import_module(path)
    assert found is importlib.import_module(f"transformer_fast.{MOVED[old]}")
    assert found.__spec__.name == found.__name__ == f"transformer_fast.{MOVED[old]}"


def test_modules_inside_and_attributes() -> None:
    assert importlib.import_module("transformer_fast.checkpoints.marian").__name__.endswith(
        "translation.checkpoints.marian"
    )
    assert tfast.packing is importlib.import_module("transformer_fast.masks.packing")


def test_a_name_that_never_was() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tfast.nothing  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("transformer_fast.nothing")
