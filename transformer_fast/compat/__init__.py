"""The signatures of other attention libraries on our kernels, for a CPU and a GPU.

Code written for one of these libraries runs here if it imports the function from this package: flash-attention 2
(``flash_attn_*``, and ``unpad_input`` and ``pad_input`` of ``bert_padding``), ``torch.nn.attention.varlen``
(``varlen_attn``), ``torch.nn.attention.flex_attention`` (``flex_attention``, and ``attention_mask_of`` for its block
masks) and FlashMask (``flashmask_attention``, and ``startend_mask`` for its row indices).
``register_flash_attention_impl`` registers our kernels with torch. docs/compat.md lists the differences.
"""

from .bert_padding import pad_input, unpad_input
from .block_masks import attention_mask_of
from .flash_attention import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from .flash_varlen import flash_attn_varlen_func, flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func
from .flashmask import flashmask_attention, startend_mask
from .flex import flex_attention
from .kv_cache import flash_attn_with_kvcache
from .torch_registry import register_flash_attention_impl
from .varlen import AuxRequest, varlen_attn

__all__ = [
    "AuxRequest",
    "attention_mask_of",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flashmask_attention",
    "flex_attention",
    "pad_input",
    "register_flash_attention_impl",
    "startend_mask",
    "unpad_input",
    "varlen_attn",
]
