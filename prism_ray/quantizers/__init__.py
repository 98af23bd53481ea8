"""(weight, format, options) -> (QuantTensor, report)."""
