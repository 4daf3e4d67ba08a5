"""The two fused steps of an adjacent causal injection (DSpine, arXiv:2609.36173)."""

import mlx.core as mx


def gated_message(
    y: mx.array, products: mx.array, anchor: mx.array, bias: mx.array
) -> tuple[mx.array, mx.array]:
    """Messages of all slots from raw products, normalisation scales moved past them.

    y = R u: [M, r]; products = y [G_q; G_p; A]^T: [M, 3a]; anchor = [G_p; A] sqrt(r) C[x_0]: [2a];
    bias: [a]. With s_t = sqrt(r) / max(||y_t||, 1e-12), so that z_t = s_t y_t:

        message_t = sigmoid(s_t G_q y_t + G_p z_{t-1} + b) * A z_{t-1},  z_0 = sqrt(r) C[x_0]

    Returns the messages [M, a] and the scaled receiver terms s_t G_q y_t + b [M, a].
    """
    a = bias.shape[0]
    wide = y.astype(mx.float32)
    norm = mx.sqrt((wide * wide).sum(axis=-1, keepdims=True))
    scale = (y.shape[-1] ** 0.5 / mx.maximum(norm, 1e-12)).astype(y.dtype)
    products = products * scale
    receiver = products[:, :a] + bias
    previous = mx.concatenate([anchor[None], products[:-1, a:]])
    return mx.sigmoid(receiver + previous[:, :a]) * previous[:, a:], receiver


def residual_write(
    u: mx.array, write: mx.array, weight: mx.array, eps: float
) -> tuple[mx.array, mx.array]:
    """h = u + RMS(u) * write (no eps), and the RMSNorm of h that follows it.

    u, write: [..., d]; weight [d] and eps: the next norm's. Returns h and norm(h).
    """
    wide = u.astype(mx.float32)
    rms = mx.sqrt((wide * wide).mean(axis=-1, keepdims=True)).astype(u.dtype)
    h = u + rms * write
    return h, mx.fast.rms_norm(h, weight, eps)
