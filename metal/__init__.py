"""The operations worth a Metal kernel: each a plain-MLX reference, a kernel, and a dispatcher.

A kernel's body is the .metal file of its name. Where it runs, and on what evidence, is decided by
`dspine_mlx.metal.kernel.Kernels`; everywhere else the reference does the same in plain MLX.
"""
