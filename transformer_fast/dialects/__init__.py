"""Three further families of Transformer code, on the same fused ops.

================================================== =================================================== ================
family                                             masks                                               weights returned
================================================== =================================================== ================
:mod:`~transformer_fast.dialects.bert`             keep masks, head axis given by the caller           after dropout
:mod:`~transformer_fast.dialects.tensorflow`       float blocked masks, 1.0 = blocked                  before dropout
:mod:`~transformer_fast.dialects.d2l`              valid lengths, (B,) or (B, Lq), one per query before dropout
================================================== =================================================== ================

The classic form, with (B, 1, Lk) keep masks, is :mod:`transformer_fast.layers`. The text of each family is plain
PyTorch in ``transformer_fast.reference.dialects``: constructors, state-dict keys, plain functions. A class here is the
text's class with a ``forward`` on the fused ops. Every mask argument also takes an
:class:`~transformer_fast.AttentionMask`.
"""

from . import bert, d2l, tensorflow

__all__ = ["bert", "d2l", "tensorflow"]
