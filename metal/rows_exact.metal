// y = x W^T for few rows x [M, K], each with the bits that MLX's kernel for one row gives it: a lane
// takes PACKS packs of columns of every 32 PACKS, unit by unit, and simd_sum ends the row.
// A simdgroup makes OUTS outputs of ROWS rows, which share each unit of W once it is unpacked.
constexpr int UNIT = unit_columns<BITS>(), TERMS = unit_terms<BITS>();
constexpr int SPAN = PACKS * pack_columns<BITS>(), BYTES = SPAN * BITS / 8;
const int M = x_shape[0], K = x_shape[1], N = scales_shape[0];
const int lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
const int first_row = threadgroup_position_in_grid.x * ROWS;  // the same weights: neighbours
const int first = (threadgroup_position_in_grid.y * SIMDGROUPS + group) * OUTS;
if (first >= N) return;

float results[OUTS][ROWS];
UNROLL for (int o = 0; o < OUTS; ++o) {
    UNROLL for (int m = 0; m < ROWS; ++m) results[o][m] = 0.0f;
}
for (int column = lane * SPAN; column < K; column += 32 * SPAN) {
    uint packed[OUTS][(BYTES + 3) / 4];
    UNROLL for (int o = 0; o < OUTS; ++o) {
        size_t at = static_cast<size_t>(min(first + o, N - 1)) * K + column;
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
            size_t row = min(first_row + m, M - 1);
            T from[UNIT];
            float values[UNIT];
            load_inputs<UNIT>(x + row * K + column + u, from);
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
        size_t at = (static_cast<size_t>(min(first + o, N - 1)) * K + column) / GROUP;
        float scale = scale_value<MODE>(scales[at]);
        float bias = MODE == AFFINE ? static_cast<float>(biases[at]) : 0.0f;
        UNROLL for (int m = 0; m < ROWS; ++m) {
            results[o][m] = add_block<MODE, FUSE>(results[o][m], scale, dots[o][m], bias, sums[m]);
        }
    }
}
UNROLL for (int o = 0; o < OUTS; ++o) {
    UNROLL for (int m = 0; m < ROWS; ++m) {
        float result = simd_sum(results[o][m]);
        if (lane == 0 && first + o < N && first_row + m < M) {
            y[static_cast<size_t>(first_row + m) * N + first + o] = static_cast<T>(result);
        }
    }
}
