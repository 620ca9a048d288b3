"""The Triton kernels of chain verification, a file a role."""
