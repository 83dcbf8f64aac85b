"""Hand-written modules that accelerate recognises by structure, with inputs for the tests: ``FORMS`` of every file
``handwritten_*.py``."""

from __future__ import annotations

import importlib
from pathlib import Path

from form_arguments import Forms

FILES = sorted(file.stem for file in Path(__file__).parent.glob("handwritten_*.py") if file.stem != Path(__file__).stem)
FORMS: Forms = {name: form for file in FILES for name, form in importlib.import_module(file).FORMS.items()}
