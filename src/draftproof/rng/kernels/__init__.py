"""Triton kernels of the streams."""
