// What the kernels for several rows of one product share. MLX puts it before a kernel's body.
#define UNROLL _Pragma("clang loop unroll(full)")

// How a packed weight is written. AFFINE: an integer, q * scale + bias. MX and NV: a float of 4 or 8
// bits and a scale that is a power of two (MX) or itself a float of 8 bits (NV), no bias.
enum Mode { AFFINE = 0, MX = 1, NV = 2 };

// Row and first column of the two elements that a lane holds of an 8x8 matrix.
inline uint2 matrix_place(uint lane) {
    return uint2((lane >> 4) * 4 + ((lane >> 1) & 3), ((lane >> 3) & 1) * 4 + (lane & 1) * 2);
}

// 16 columns of a row of W are a run: as they are (BITS 0), or in 32-bit words, packed as fields of
// BITS bits from the lowest up.
template <int BITS>
inline constexpr int run_length() {
    return BITS == 0 ? 16 : (BITS + 1) / 2;
}

// The run that begins at element `at`, a multiple of 16.
template <int BITS>
inline void load_run(const device uint* matrix, size_t at, thread uint* run) {
    if constexpr (BITS == 4) {
        uint2 two = *(const device uint2*)(matrix + at / 8);
        UNROLL for (int i = 0; i < 2; ++i) run[i] = two[i];
    } else if constexpr (BITS == 8) {
        uint4 four = *(const device uint4*)(matrix + at / 4);
        UNROLL for (int i = 0; i < 4; ++i) run[i] = four[i];
    } else if constexpr (BITS == 6) {
        UNROLL for (int i = 0; i < 3; ++i) run[i] = matrix[at / 16 * 3 + i];
    } else {  // 3 or 5 half words
        const device ushort* halves = (const device ushort*)matrix + at / 16 * BITS;
        UNROLL for (int i = 0; i < BITS; i += 2) {
            uint high = i + 1 < BITS ? halves[i + 1] : 0;
            run[i / 2] = halves[i] | high << 16;
        }
    }
}

template <int BITS, typename T>
inline void load_run(const device T* matrix, size_t at, thread T* run) {
    UNROLL for (int i = 0; i < 16; i += 4) {
        vec<T, 4> four = *(const device vec<T, 4>*)(matrix + at + i);
        UNROLL for (int e = 0; e < 4; ++e) run[i + e] = four[e];
    }
}

// BYTES bytes of a packed matrix from byte `at`, a multiple of their largest power of two, on.
template <int BYTES>
inline void load_bytes(const device uint* matrix, size_t at, thread uint* words) {
    if constexpr (BYTES % 4 == 0) {
        UNROLL for (int i = 0; i < BYTES / 4; ++i) words[i] = matrix[at / 4 + i];
    } else {
        const device uchar* bytes = (const device uchar*)matrix + at;
        UNROLL for (int i = 0; i < (BYTES + 3) / 4; ++i) words[i] = 0;
        UNROLL for (int i = 0; i < BYTES; ++i) {
            words[i / 4] |= static_cast<uint>(bytes[i]) << (8 * (i % 4));
        }
    }
}

// A float of 4 bits (e2m1) or 8 (e4m3): a half whose exponent has another bias.
template <int BITS>
inline float small_float(uint bits) {
    constexpr uint MANTISSA = BITS == 4 ? 1 : 3;
    constexpr float REBIAS = BITS == 4 ? 16384.0f : 256.0f;
    uint magnitude = (bits & ((1u << (BITS - 1)) - 1u)) << (10 - MANTISSA);
    uint sign = (bits >> (BITS - 1)) << 15;
    return static_cast<float>(as_type<half>(static_cast<ushort>(sign | magnitude))) * REBIAS;
}

// Field i of a packed run.
template <int BITS>
inline uint run_field(const thread uint* run, int i) {
    int word = i * BITS / 32, low = i * BITS % 32;
    uint bits = run[word] >> low;
    if (low + BITS > 32) bits |= run[word + 1] << (32 - low);
    return bits & ((1u << BITS) - 1u);
}

// Column i of a run, without scale and bias.
template <int MODE, int BITS>
inline float run_value(const thread uint* run, int i) {
    uint bits = run_field<BITS>(run, i);
    if constexpr (MODE == AFFINE) return static_cast<float>(bits);
    else return small_float<BITS>(bits);
}

template <int MODE, int BITS, typename T>
inline float run_value(const thread T* run, int i) {
    return static_cast<float>(run[i]);
}

template <int MODE, typename S>
inline float scale_value(S scale) {
    if constexpr (MODE == AFFINE) {
        return static_cast<float>(scale);
    } else if constexpr (MODE == NV) {
        return small_float<8>(scale);
    } else {
        return as_type<float>(scale == 0 ? 1u << 22 : static_cast<uint>(scale) << 23);
    }
}

// 8 columns of one key or value of a cache from `column`, a multiple of 8, on, as T: as they are (BITS
// 0), or packed (scales and biases are not read at BITS 0). at, scales_at: where the key or value begins.
template <int BITS, int GROUP, typename T, typename S>
inline void load_cached(
    const device T* cache, size_t at, size_t stride, const device S*, const device S*, size_t,
    int column, thread T* to) {
    if (stride == 1) {
        UNROLL for (int c = 0; c < 8; ++c) to[c] = cache[at + column + c];
    } else {
        UNROLL for (int c = 0; c < 8; ++c) to[c] = cache[at + (column + c) * stride];
    }
}

template <int BITS, int GROUP, typename T>
inline void load_cached(
    const device uint* cache, size_t at, size_t, const device T* scales, const device T* biases,
    size_t scales_at, int column, thread T* to) {
    float scale = static_cast<float>(scales[scales_at + column / GROUP]);
    float bias = static_cast<float>(biases[scales_at + column / GROUP]);
    uint run[(BITS + 3) / 4];
    load_bytes<BITS>(cache, 4 * at + column / 8 * BITS, run);
    UNROLL for (int c = 0; c < 8; ++c) {
        to[c] = static_cast<T>(static_cast<float>(run_field<BITS>(run, c)) * scale + bias);
    }
}
