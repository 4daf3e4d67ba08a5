// y = x W^T for few rows x [M, K] on the matrix units. W is the left factor and rows of x are the
// columns of the right one, so 8 or 16 rows share every weight once it is unpacked in registers.
// A threadgroup makes 8 NT outputs of 8 RT rows. Its SPLIT simdgroups take turns at chunks of 64
// columns, 8 groups of 8: step s multiplies column s of every group. Sums do not depend on M.
constexpr int CHUNK = 64;
constexpr bool FACTORED = BITS > 0 && GROUP % CHUNK == 0;  // scale and bias may follow the sum
using Run = conditional_t<BITS == 0, T, uint>;
threadgroup float parts[SPLIT * RT * 8 * NT * 8];
const uint M = x_shape[0], K = x_shape[1], N = scales_shape[0];
const uint part = simdgroup_index_in_threadgroup;
const uint2 place = matrix_place(thread_index_in_simdgroup);
const uint first = threadgroup_position_in_grid.x * 8 * NT;
const uint first_row = threadgroup_position_in_grid.y * 8 * RT;

float totals[NT][RT][2];
simdgroup_matrix<float, 8, 8> sums[NT][RT];
UNROLL for (int t = 0; t < NT; ++t) {
    UNROLL for (int r = 0; r < RT; ++r) {
        totals[t][r][0] = totals[t][r][1] = 0.0f;
        sums[t][r] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
}
for (uint start = part * CHUNK; start < K; start += SPLIT * CHUNK) {
    // the lane's part of x: columns of group place.x in two rows (the last one repeats beyond M)
    const uint column = start + 8 * place.x;
    vec<T, 4> inputs[RT][2][2];
    float row_sums[RT][2];
    UNROLL for (int r = 0; r < RT; ++r) {
        UNROLL for (int e = 0; e < 2; ++e) {
            size_t row = min(first_row + 8 * r + place.y + e, M - 1);
            const device vec<T, 4>* from = (const device vec<T, 4>*)(x + row * K + column);
            bool inside = FACTORED || column < K;  // groups of 64 fill whole chunks
            UNROLL for (int h = 0; h < 2; ++h) {
                inputs[r][e][h] = inside ? from[h] : vec<T, 4>(T(0.0f));
            }
            if (FACTORED) {
                float sum = 0.0f;
                UNROLL for (int s = 0; s < 8; ++s) {
                    sum += static_cast<float>(inputs[r][e][s / 4][s % 4]);
                }
                sum += simd_shuffle_xor(sum, 2);  // lanes of the same rows and other columns
                sum += simd_shuffle_xor(sum, 4);
                row_sums[r][e] = sum + simd_shuffle_xor(sum, 16);
            }
        }
    }
    // its part of W: groups place.y and the next in one row a tile (the last one repeats beyond N)
    const uint run_column = start + 8 * place.y;
    Run runs[NT][run_length<BITS>()];
    float scale[NT], bias[NT];
    UNROLL for (int t = 0; t < NT; ++t) {
        size_t at = static_cast<size_t>(min(first + 8 * t + place.x, N - 1)) * K + run_column;
        scale[t] = bias[t] = 0.0f;
        UNROLL for (int i = 0; i < run_length<BITS>(); ++i) runs[t][i] = static_cast<Run>(0);
        if (FACTORED || run_column < K) {
            load_run<BITS>(weight, at, runs[t]);
            if (BITS > 0) scale[t] = scale_value<MODE>(scales[at / GROUP]);
            if (BITS > 0 && MODE == AFFINE) bias[t] = static_cast<float>(biases[at / GROUP]);
        }
    }
    UNROLL for (int s = 0; s < 8; ++s) {
        simdgroup_matrix<float, 8, 8> right[RT];
        UNROLL for (int r = 0; r < RT; ++r) {
            UNROLL for (int e = 0; e < 2; ++e) {
                right[r].thread_elements()[e] = static_cast<float>(inputs[r][e][s / 4][s % 4]);
            }
        }
        UNROLL for (int t = 0; t < NT; ++t) {
            simdgroup_matrix<float, 8, 8> left;
            UNROLL for (int e = 0; e < 2; ++e) {
                float value = run_value<MODE, BITS>(runs[t], 8 * e + s);
                bool whole = FACTORED || BITS == 0;
                left.thread_elements()[e] = whole ? value : value * scale[t] + bias[t];
            }
            UNROLL for (int r = 0; r < RT; ++r) {
                simdgroup_multiply_accumulate(sums[t][r], left, right[r], sums[t][r]);
            }
        }
    }
    if (!FACTORED) continue;
    UNROLL for (int t = 0; t < NT; ++t) {
        UNROLL for (int r = 0; r < RT; ++r) {
            UNROLL for (int e = 0; e < 2; ++e) {
                totals[t][r][e] += scale[t] * sums[t][r].thread_elements()[e]
                    + bias[t] * row_sums[r][e];
            }
            sums[t][r] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        }
    }
}
UNROLL for (int t = 0; t < NT; ++t) {
    UNROLL for (int r = 0; r < RT; ++r) {
        UNROLL for (int e = 0; e < 2; ++e) {
            float total = FACTORED ? totals[t][r][e] : sums[t][r].thread_elements()[e];
            parts[((part * RT + r) * 8 + place.y + e) * 8 * NT + 8 * t + place.x] = total;
        }
    }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint i = thread_index_in_threadgroup; i < 64 * NT * RT; i += 32 * SPLIT) {
    float total = 0.0f;
    for (uint p = 0; p < SPLIT; ++p) total += parts[p * 64 * NT * RT + i];
    uint row = first_row + i / (8 * NT), output = first + i % (8 * NT);
    if (row < M && output < N) y[static_cast<size_t>(row) * N + output] = static_cast<T>(total);
}
