"""Triton kernels of the common frame round every operation."""
