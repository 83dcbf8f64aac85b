"""Training of a translator from two aligned text files: text, tokenizer, batches, training, checkpoints.

from transformer_fast.translation import TrainConfig, train, load_trained

result = train(TrainConfig(source="train.en", target="train.de", save="run", max_time=1200))
trained = load_trained("run")
"""

from .averaging import average_checkpoints, load_average, save_average
from .checkpoint import RunFolder
from .config import TrainConfig, parse_duration
from .errors import CheckpointError, ConfigError, DataError, DivergedError, TranslationError
from .imported import ModelConfig
from .model import Trained, build_model, load_trained
from .pair_tokenizer import PairTokenizer
from .progress import TrainResult
from .recipes import load_recipe, recipe_names
from .text import read_lines, read_parallel
from .tokenizer import Tokenizer
from .training import train

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DivergedError",
    "ModelConfig",
    "PairTokenizer",
    "RunFolder",
    "Tokenizer",
    "TrainConfig",
    "TrainResult",
    "Trained",
    "TranslationError",
    "average_checkpoints",
    "build_model",
    "load_average",
    "load_recipe",
    "load_trained",
    "parse_duration",
    "read_lines",
    "read_parallel",
    "recipe_names",
    "save_average",
    "train",
]
