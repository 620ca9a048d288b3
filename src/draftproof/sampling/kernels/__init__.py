"""Triton kernels of sampling, one role a file. ``sampling/triton.py`` launches them."""
