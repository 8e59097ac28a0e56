"""Numerical kernels: each one a Triton kernel beside the plain-torch reference it is tested against.

Kernels know tensors, never requests. An operation `f` has up to four parts, in one file or in a few whose
headers name each other: `f_reference`, plain torch, which a CPU runs; the Triton kernels; `f_triton`, which
launches them; and `f`, which callers use and which chooses by the tensors' device.
"""
