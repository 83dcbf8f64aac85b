"""The rows of ``make mutants``."""

from .fault import Fault
from .rows_accelerate import ROWS as ACCELERATE
from .rows_cpp import ROWS as CPP
from .rows_generation import ROWS as GENERATION
from .rows_python import ROWS as PYTHON
from .rows_triton import ROWS as TRITON

ROWS: tuple[Fault, ...] = (*CPP, *TRITON, *PYTHON, *ACCELERATE, *GENERATION)
