from .predictions import Range

FACTOR = Range(0.81, 0.96)
