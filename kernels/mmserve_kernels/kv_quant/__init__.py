"""Keys and values of pages in 8 or 4 bits, with salient tokens at full precision."""

from mmserve_kernels.kv_quant.pages import QuantizedPages
from mmserve_kernels.kv_quant.reference import dequantize, keep, kv_quant

__all__ = ["QuantizedPages", "dequantize", "keep", "kv_quant"]
