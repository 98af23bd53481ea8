"""prism-ray: calibrate, quantize, diagnose, tune and ship 4-bit language models on Ray clusters."""

__version__ = "0.1.0"
