"""The operations worth a Metal kernel: each a plain-MLX reference, a kernel, and a dispatcher."""
