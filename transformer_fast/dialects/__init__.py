"""Three further families of Transformer code, as thin adapters around the same fused ops.

================================================== =================================================== ================
family                                             masks                                               weights returned
================================================== =================================================== ================
:mod:`~transformer_fast.dialects.bert`             keep masks, head axis given by the caller           after dropout
:mod:`~transformer_fast.dialects.tensorflow`       float blocked masks, 1.0 = blocked                  before dropout
:mod:`~transformer_fast.dialects.d2l`              valid lengths, (B,) or (B, Lq), one per query before dropout
================================================== =================================================== ================

The classic form, with (B, 1, Lk) keep masks, is :mod:`transformer_fast.layers`. Constructors, state-dict keys and
argument orders are those of the originals; ``transformer_fast.reference.dialects`` has the reference of each. Every
mask argument also takes an :class:`~transformer_fast.AttentionMask`.
"""

from . import bert, d2l, tensorflow

__all__ = ["bert", "d2l", "tensorflow"]
