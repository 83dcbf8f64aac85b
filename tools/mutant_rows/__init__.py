"""The rows of ``make mutants``."""

from .fault import Fault
from .rows_accelerate import ROWS as ACCELERATE
from .rows_compat import ROWS as COMPAT
from .rows_cpp import ROWS as CPP
from .rows_cpp_ops import ROWS as CPP_OPS
from .rows_cpp_rows import ROWS as CPP_ROWS
from .rows_generation import ROWS as GENERATION
from .rows_layers import ROWS as LAYERS
from .rows_packed import ROWS as PACKED
from .rows_python import ROWS as PYTHON
from .rows_repairs import ROWS as REPAIRS
from .rows_translation import ROWS as TRANSLATION
from .rows_triton import ROWS as TRITON

ROWS: tuple[Fault, ...] = (
    *CPP,
    *CPP_ROWS,
    *CPP_OPS,
    *TRITON,
    *PYTHON,
    *LAYERS,
    *ACCELERATE,
    *COMPAT,
    *PACKED,
    *GENERATION,
    *TRANSLATION,
    *REPAIRS,
)
