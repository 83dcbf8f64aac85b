"""Import of models of other programs, and export to other programs.

from transformer_fast.translation.checkpoints import export_hf, import_marian

import_marian("opus-mt-en-de", "run")
export_hf("run", "copy")
"""

from .export import export_ctranslate2, export_hf
from .marian import import_marian

__all__ = ["export_ctranslate2", "export_hf", "import_marian"]
