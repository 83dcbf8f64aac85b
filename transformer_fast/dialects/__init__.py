"""Three more ways in which people write the Transformer, each a thin adapter around the same fused ops.

================================================== =================================================== ================
family                                             masks                                               weights returned
================================================== =================================================== ================
:mod:`~transformer_fast.dialects.bert`             keep masks, head axis given by the caller           after dropout
:mod:`~transformer_fast.dialects.tensorflow`       float blocked masks, 1.0 = blocked                  before dropout
:mod:`~transformer_fast.dialects.d2l`              valid lengths, (B,) or one length a query (B, Lq)   before dropout
================================================== =================================================== ================

The classic form, with (B, 1, Lk) keep masks, is :mod:`transformer_fast.layers`. Constructors, state-dict keys and
forward orders are the originals'; the oracle of each is ``transformer_fast.reference.dialects``. Wherever a mask goes,
an :class:`~transformer_fast.AttentionMask` goes as well.
"""

from . import bert, d2l, tensorflow

__all__ = ["bert", "d2l", "tensorflow"]
