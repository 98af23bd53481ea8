"""Triton kernels of prism-ray, each beside its PyTorch reference. The PyTorch paths live in `prism_ray` until the kernels land."""
