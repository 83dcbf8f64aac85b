"""Hugging Face transformers: ``attn_implementation="transformer_fast"``.

>>> tfast.integrations.transformers.register()
>>> model = AutoModel.from_pretrained(name, attn_implementation="transformer_fast")
"""

from ..huggingface.attention import attention_forward, attention_mask, register

__all__ = ["attention_forward", "attention_mask", "register"]
