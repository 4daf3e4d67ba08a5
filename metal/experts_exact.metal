// y = x W_e^T for pairs of a row of x and an expert e, each with the bits that MLX's kernel gives it. The
// first pair of an expert makes the results of all pairs of that expert, ROWS at a time, which share
// each unit of W once it is unpacked. PER pairs in a row have the same row of x.
const int pairs = indices_shape[0], K = x_shape[1], N = scales_shape[1];
const int lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
const int own = threadgroup_position_in_grid.y;
const int first = (threadgroup_position_in_grid.x * SIMDGROUPS + group) * OUTS;
if (first >= N) return;

const uint expert = indices[own];
size_t outputs[OUTS];
UNROLL for (int o = 0; o < OUTS; ++o) {
    outputs[o] = static_cast<size_t>(expert) * N + min(first + o, N - 1);
}
for (int start = 0; start < pairs; start += 32) {
    bool same = start + lane < pairs && indices[min(start + lane, pairs - 1)] == expert;
    uint left = simd_or(same ? 1u << lane : 0u);
    if (start + 32 <= own) {
        if (left != 0) return;  // an earlier pair makes them
        continue;
    }
    if (start <= own && (left & ((1u << (own - start)) - 1u)) != 0) return;
    while (left != 0) {
        size_t rows[ROWS];
        int pair[ROWS], count = 0;
        UNROLL for (int m = 0; m < ROWS; ++m) {
            if (left != 0) {
                pair[m] = start + ctz(left);
                left &= left - 1;
                count = m + 1;
            } else {
                pair[m] = pair[m > 0 ? m - 1 : 0];  // computed again, not stored
            }
            rows[m] = pair[m] / per;
        }
        float results[OUTS * ROWS];
        lane_sums<MODE, BITS, GROUP, PACKS, WIDE, FUSE, OUTS, ROWS>(
            weight, scales, biases, x, outputs, rows, K, lane, results);
        UNROLL for (int o = 0; o < OUTS; ++o) {
            UNROLL for (int m = 0; m < ROWS; ++m) {
                float result = simd_sum(results[o * ROWS + m]);
                if (lane == 0 && first + o < N && m < count) {
                    y[static_cast<size_t>(pair[m]) * N + first + o] = static_cast<T>(result);
                }
            }
        }
    }
}
