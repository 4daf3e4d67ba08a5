// y = x W^T for few rows x [M, K], each with the bits that MLX's kernel for one row gives it. A
// simdgroup makes OUTS outputs of ROWS rows, which share each unit of W once it is unpacked.
const int M = x_shape[0], K = x_shape[1], N = scales_shape[0];
const int lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
const int first_row = threadgroup_position_in_grid.x * ROWS;  // the same weights: neighbours
const int first = (threadgroup_position_in_grid.y * SIMDGROUPS + group) * OUTS;
if (first >= N) return;

size_t outputs[OUTS], rows[ROWS];
UNROLL for (int o = 0; o < OUTS; ++o) outputs[o] = min(first + o, N - 1);
UNROLL for (int m = 0; m < ROWS; ++m) rows[m] = min(first_row + m, M - 1);
float results[OUTS * ROWS];
lane_sums<MODE, BITS, GROUP, PACKS, WIDE, FUSE, OUTS, ROWS>(
    weight, scales, biases, x, outputs, rows, K, lane, results);
UNROLL for (int o = 0; o < OUTS; ++o) {
    UNROLL for (int m = 0; m < ROWS; ++m) {
        float result = simd_sum(results[o * ROWS + m]);
        if (lane == 0 && first + o < N && first_row + m < M) {
            y[static_cast<size_t>(first_row + m) * N + first + o] = static_cast<T>(result);
        }
    }
}
