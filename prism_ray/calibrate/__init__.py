"""From a full-precision model to a quantized checkpoint."""
