"""One target on several machines, on mlx.distributed: rank 0 decides, the others follow."""
