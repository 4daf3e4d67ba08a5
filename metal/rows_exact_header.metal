// The order in which MLX's kernel for one row adds products, spelt out. After rows_header.

// Columns of a pack: 32 bits, or 3 or 5 bytes.
template <int BITS>
inline constexpr int pack_columns() {
    return BITS == 3 || BITS == 5 ? 8 : BITS == 6 ? 4 : 32 / BITS;
}

// Columns of a unit: their values of x are added together before they join the sum for the bias.
template <int BITS>
inline constexpr int unit_columns() {
    return BITS == 3 || BITS == 5 ? 8 : 4;
}

// Fields are masked where they lie in a window of so many bits, and x is scaled down to match.
template <int BITS>
inline constexpr int window_bits() {
    return BITS == 4 ? 16 : 8;
}

// Products of a unit: a field that lies in two windows makes two.
template <int BITS>
inline constexpr int unit_terms() {
    return BITS == 3 ? 10 : BITS == 5 ? 12 : BITS == 6 ? 6 : 4;
}

// COLUMNS columns of a row of x, a multiple of 4, from a multiple of 4 on.
template <int COLUMNS, typename T>
inline void load_inputs(const device T* from, thread T* to) {
    UNROLL for (int i = 0; i < COLUMNS; i += 4) {
        vec<T, 4> four = *(const device vec<T, 4>*)(from + i);
        UNROLL for (int e = 0; e < 4; ++e) to[i + e] = four[e];
    }
}

// One factor of each product of the unit that begins at `bit`: fields of integers, or the small floats
// themselves.
template <int MODE, int BITS>
inline void unit_weights(const thread uint* words, int bit, thread float* terms) {
    constexpr int WINDOW = window_bits<BITS>();
    int term = 0;
    if constexpr (MODE != AFFINE) {
        UNROLL for (int c = 0; c < unit_columns<BITS>(); ++c) {
            int at = bit + c * BITS;
            uint field = words[at / 32] >> (at % 32) & ((1u << BITS) - 1u);
            terms[c] = small_float<BITS>(field);
        }
        return;
    }
    UNROLL for (int c = 0; c < unit_columns<BITS>(); ++c) {
        int at = bit + c * BITS, low = at % WINDOW;
        int inside = min(BITS, WINDOW - low);
        uint window = words[at / 32] >> (at % 32 - low);
        terms[term++] = static_cast<float>(window & (((1u << inside) - 1u) << low));
        if (inside < BITS) {
            window = words[(at + inside) / 32] >> ((at + inside) % 32);
            terms[term++] = static_cast<float>(window & ((1u << (BITS - inside)) - 1u));
        }
    }
}

// The other: x, for integers over 2^low, and times 2^WINDOW for the rest of a field. Powers of two:
// exact.
template <int MODE, int BITS>
inline void unit_inputs(const thread float* x, thread float* terms) {
    constexpr int WINDOW = window_bits<BITS>();
    int term = 0;
    if constexpr (MODE != AFFINE) {
        UNROLL for (int c = 0; c < unit_columns<BITS>(); ++c) terms[c] = x[c];
        return;
    }
    UNROLL for (int c = 0; c < unit_columns<BITS>(); ++c) {
        int low = c * BITS % WINDOW;
        float scaled = x[c] / static_cast<float>(1 << low);
        terms[term++] = scaled;
        if (low + BITS > WINDOW) terms[term++] = scaled * static_cast<float>(1 << WINDOW);
    }
}

// What a unit's values of x add to the sum for the bias. WIDE: in float32, as MLX does since 0.32.4,
// else in x's own type; at 8 bits value after value.
template <int BITS, bool WIDE, typename T>
inline float add_inputs(float sum, const thread T* x) {
    if constexpr (BITS == 8) {
        UNROLL for (int c = 0; c < unit_columns<BITS>(); ++c) sum += static_cast<float>(x[c]);
        return sum;
    } else {
        conditional_t<WIDE, float, T> unit = static_cast<conditional_t<WIDE, float, T>>(x[0]);
        UNROLL for (int c = 1; c < unit_columns<BITS>(); ++c) {
            unit = unit + static_cast<conditional_t<WIDE, float, T>>(x[c]);
        }
        return sum + static_cast<float>(unit);
    }
}

// Which products the compiler fuses with an addition in MLX's kernel is its choice, and in another
// kernel it may choose otherwise. FUSE 0 leaves it to the compiler here, too. 1 to 4 spell it out:
// what the second of a unit's four products at 4 bits joins (1 and 2: the first product, rounded; 3
// and 4: the other way round), and which product is rounded when scale and bias are applied.
template <int FUSE>
inline float sum_of_four(const thread float* a, const thread float* b) {
    if constexpr (FUSE == 0) {
        return a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3];
    } else {
        float two = FUSE <= 2 ? fma(a[1], b[1], a[0] * b[0]) : fma(a[0], b[0], a[1] * b[1]);
        return fma(a[3], b[3], fma(a[2], b[2], two));
    }
}

template <int BITS, int FUSE>
inline float add_unit(float dot, const thread float* a, const thread float* b) {
    if constexpr (BITS == 4) return dot + sum_of_four<FUSE>(a, b);
    UNROLL for (int i = 0; i < unit_terms<BITS>(); ++i) {
        dot = FUSE == 0 ? dot + a[i] * b[i] : fma(a[i], b[i], dot);
    }
    return dot;
}

// A row's result with a block's products. Small floats have no bias: there the odd forms fuse the
// scale with the addition.
template <int MODE, int FUSE>
inline float add_block(float result, float scale, float dot, float bias, float sum) {
    if constexpr (MODE != AFFINE) {
        if (FUSE % 2 == 1) return fma(scale, dot, result);
        float scaled = scale * dot;  // a statement of its own, as in MLX
        return result + scaled;
    } else if constexpr (FUSE == 0) {
        return result + (scale * dot + sum * bias);
    } else {
        return result + (FUSE % 2 == 1 ? fma(scale, dot, sum * bias) : fma(sum, bias, scale * dot));
    }
}

// A lane's part of OUTS x ROWS results, which simd_sum completes: it takes PACKS packs of columns of
// every 32 PACKS, unit by unit. outputs, rows: rows of W and of x.
template <int MODE, int BITS, int GROUP, int PACKS, bool WIDE, int FUSE, int OUTS, int ROWS,
          typename T, typename S, typename B>
inline void lane_sums(
    const device uint* weight, const device S* scales, const device B* biases, const device T* x,
    const thread size_t* outputs, const thread size_t* rows, int K, int lane,
    thread float* results) {
    constexpr int UNIT = unit_columns<BITS>(), TERMS = unit_terms<BITS>();
    constexpr int SPAN = PACKS * pack_columns<BITS>(), BYTES = SPAN * BITS / 8;
    UNROLL for (int i = 0; i < OUTS * ROWS; ++i) results[i] = 0.0f;
    for (int column = lane * SPAN; column < K; column += 32 * SPAN) {
        uint packed[OUTS][(BYTES + 3) / 4];
        UNROLL for (int o = 0; o < OUTS; ++o) {
            size_t at = outputs[o] * K + column;
            load_bytes<BYTES>(weight, at / 8 * BITS + at % 8 * BITS / 8, packed[o]);
        }
        float dots[OUTS][ROWS], sums[ROWS];
        UNROLL for (int m = 0; m < ROWS; ++m) {
            sums[m] = 0.0f;
            UNROLL for (int o = 0; o < OUTS; ++o) dots[o][m] = 0.0f;
        }
        UNROLL for (int u = 0; u < SPAN; u += UNIT) {
            float inputs[ROWS][TERMS];
            UNROLL for (int m = 0; m < ROWS; ++m) {
                T from[UNIT];
                float values[UNIT];
                load_inputs<UNIT>(x + rows[m] * K + column + u, from);
                UNROLL for (int c = 0; c < UNIT; ++c) values[c] = static_cast<float>(from[c]);
                if (MODE == AFFINE) sums[m] = add_inputs<BITS, WIDE>(sums[m], from);
                unit_inputs<MODE, BITS>(values, inputs[m]);
            }
            UNROLL for (int o = 0; o < OUTS; ++o) {
                float weights[TERMS];
                unit_weights<MODE, BITS>(packed[o], u * BITS, weights);
                UNROLL for (int m = 0; m < ROWS; ++m) {
                    dots[o][m] = add_unit<BITS, FUSE>(dots[o][m], inputs[m], weights);
                }
            }
        }
        UNROLL for (int o = 0; o < OUTS; ++o) {
            size_t at = (outputs[o] * K + column) / GROUP;
            float scale = scale_value<MODE>(scales[at]);
            float bias = MODE == AFFINE ? static_cast<float>(biases[at]) : 0.0f;
            UNROLL for (int m = 0; m < ROWS; ++m) {
                results[o * ROWS + m] = add_block<MODE, FUSE>(
                    results[o * ROWS + m], scale, dots[o][m], bias, sums[m]);
            }
        }
    }
}
