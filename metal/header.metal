// What the kernels share. MLX puts it before the kernel it makes of a body.

// The sum of value over the threadgroup, in every thread. partial: one float per simdgroup, used
// for one sum only (no barrier protects it from the next).
template <typename Partial>
inline float threadgroup_sum(float value, Partial partial, uint lane, uint group, uint groups) {
    value = simd_sum(value);
    if (lane == 0) partial[group] = value;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return simd_sum(lane < groups ? partial[lane] : 0.0f);
}

// Columns held by one element of a matrix row: 1, or those packed into a 32-bit word.
template <int BITS>
inline constexpr int packed_columns() {
    return BITS == 0 ? 1 : 32 / (BITS == 0 ? 1 : BITS);
}

// The packed_columns<BITS>() columns from `column` on of a row of a [rows, D] matrix, as floats.
// BITS 0: a floating matrix, scales and biases are not read. Else MLX's affine quantisation:
// little-endian fields of 32-bit words, q * scale + bias with one scale and bias per GROUP columns.
template <int BITS, int GROUP, typename Matrix, typename Scales, typename To>
inline void load_columns(
    Matrix matrix, Scales scales, Scales biases, size_t row, uint D, uint column, To to) {
    if constexpr (BITS == 0) {
        to[0] = static_cast<float>(matrix[row * D + column]);
    } else {
        constexpr int PACKED = packed_columns<BITS>();
        uint word = matrix[(row * D + column) / PACKED];
        size_t scaled = (row * D + column) / GROUP;
        float scale = static_cast<float>(scales[scaled]);
        float bias = static_cast<float>(biases[scaled]);
        for (int p = 0; p < PACKED; ++p) {
            to[p] = static_cast<float>((word >> (BITS * p)) & ((1u << BITS) - 1u)) * scale + bias;
        }
    }
}
