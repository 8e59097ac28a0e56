"""Numerical kernels: each one a Triton kernel beside the plain-torch reference it is tested against.

Kernels know tensors, never requests. The references are what runs on a CPU.
"""
