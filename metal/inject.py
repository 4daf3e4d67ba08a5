"""The two fused steps of an adjacent causal injection (DSpine, arXiv:2609.36173)."""

from collections.abc import Callable

import mlx.core as mx

from dspine_mlx.metal.kernel import OFF, Arrays, Kernel, Kernels

THREADS = 512  # per threadgroup; Metal may allow fewer than 1024 for a kernel with many registers
MAX_SIZE = 8192


def root_mean_square(x: mx.array) -> mx.array:
    """Compute sqrt(mean(x^2)) over the last axis, which is kept; in float32, rounded once."""
    wide = x.astype(mx.float32)
    return mx.sqrt((wide * wide).mean(axis=-1, keepdims=True)).astype(x.dtype)


def size_limit(size: int) -> str | None:
    """Why the kernels don't serve a hidden size, or None."""
    if 64 <= size <= MAX_SIZE and size % 32 == 0:
        return None
    return f"hidden size {size} is no multiple of 32 from 64 to {MAX_SIZE}"


def gated_message(
    y: mx.array, products: mx.array, anchor: mx.array, bias: mx.array, kernels: Kernels = OFF
) -> tuple[mx.array, mx.array]:
    """Compute all slots' messages from raw products, applying normalisation scales after them.

    y = R u: [M, r]; products = y [G_q; G_p; A]^T: [M, 3a]; anchor = [G_p; A] sqrt(r) C[x_0]: [2a];
    bias: [a]. With s_t = sqrt(r) / max(||y_t||, 1e-12), so that z_t = s_t y_t:

        message_t = sigmoid(s_t G_q y_t + G_p z_{t-1} + b) * A z_{t-1},  z_0 = sqrt(r) C[x_0]

    Of several texts all but the bias have a leading axis. Returns the messages [M, a] and the
    scaled receiver terms s_t G_q y_t + b [M, a].
    """
    message, receiver = kernels.run(GATED_MESSAGE, y, products, anchor, bias)
    return message, receiver


def gated_message_reference(
    y: mx.array, products: mx.array, anchor: mx.array, bias: mx.array
) -> Arrays:
    a = bias.shape[0]
    wide = y.astype(mx.float32)
    norm = mx.sqrt((wide * wide).sum(axis=-1, keepdims=True))
    scale = (y.shape[-1] ** 0.5 / mx.maximum(norm, 1e-12)).astype(y.dtype)
    products = products * scale
    receiver = products[..., :a] + bias
    previous = mx.concatenate([anchor[..., None, :], products[..., :-1, a:]], axis=-2)
    return [mx.sigmoid(receiver + previous[..., :a]) * previous[..., a:], receiver]


def launch_gated_message(
    function: Callable[..., Arrays],
    y: mx.array,
    products: mx.array,
    anchor: mx.array,
    bias: mx.array,
) -> Arrays:
    shape, threads = (*y.shape[:-1], bias.shape[0]), 256
    y = y if y.ndim == 3 else y[None]
    return function(
        inputs=[y, products, anchor, bias],
        template=[("T", y.dtype), ("TG", threads)],
        grid=(y.shape[0] * y.shape[1] * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape, shape],
        output_dtypes=[y.dtype, y.dtype],
    )


GATED_MESSAGE = Kernel(
    "gated_message",
    ["y", "products", "anchor", "bias"],
    ["message", "receiver"],
    gated_message_reference,
    launch_gated_message,
    limits=lambda *_: None,
)


def residual_write(
    block: mx.array, write: mx.array, weight: mx.array, eps: float, kernels: Kernels = OFF
) -> tuple[mx.array, mx.array]:
    """h = u + RMS(u) * write (no eps), and the RMSNorm of h that follows it.

    block: [n, d]; write [M, d] is added to its last M rows u, and the first n - M rows stay as they
    are. weight [d] and eps: the next norm's. Returns h and norm(h), both [n, d]. For several texts
    block and write have a leading axis.
    """
    h, normed = kernels.run(RESIDUAL_WRITE, block, write, weight, eps)
    return h, normed


def residual_write_reference(
    block: mx.array, write: mx.array, weight: mx.array, eps: float
) -> Arrays:
    kept = block.shape[-2] - write.shape[-2]
    u = block[..., kept:, :]
    h = mx.concatenate([block[..., :kept, :], u + root_mean_square(u) * write], axis=-2)
    return [h, mx.fast.rms_norm(h, weight, eps)]


def launch_residual_write(
    function: Callable[..., Arrays],
    block: mx.array,
    write: mx.array,
    weight: mx.array,
    eps: float,
) -> Arrays:
    shape, size, threads = block.shape, block.shape[-1], THREADS
    if block.ndim == 2:
        block, write = block[None], write[None]
    return function(
        inputs=[block, write, weight, eps],
        template=[("T", block.dtype), ("TG", threads), ("N", -(-size // threads))],
        grid=(block.shape[0] * block.shape[1] * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape, shape],
        output_dtypes=[block.dtype, block.dtype],
    )


RESIDUAL_WRITE = Kernel(
    "residual_write",
    ["block", "write", "weight", "eps"],
    ["h", "normed"],
    residual_write_reference,
    launch_residual_write,
    limits=lambda block, *_: size_limit(block.shape[-1]),
)
