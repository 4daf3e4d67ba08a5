"""Operations with Metal kernels: each has a plain-MLX reference, a kernel, and a dispatcher.

A kernel's body is the .metal file of its name. `dspine_mlx.metal.kernel.Kernels` decides where it
runs, after a check. Everywhere else the reference does the same in plain MLX.
"""
