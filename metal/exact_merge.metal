// Second pass, in the order of MLX's: a threadgroup of 32 simdgroups a row, block b of every 32 for
// simdgroup b, then the 32 sums of each column.
constexpr int PER = V / 32, BLOCKS_EACH = BLOCKS / 32;
threadgroup float columns[32 * 32];
const int lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
const size_t row = threadgroup_position_in_grid.x;
const device float* row_tops = tops + row * BLOCKS;
const device float* row_totals = totals + row * BLOCKS;

float top = -FLT_MAX;
for (int b = 0; b < BLOCKS_EACH; ++b) top = max(top, row_tops[lane + 32 * b]);
top = simd_max(top);
float total = 0.0f;
for (int b = 0; b < BLOCKS_EACH; ++b) {
    float weight = metal::fast::exp(row_tops[lane + 32 * b] - top);
    total += weight * row_totals[lane + 32 * b];
}
total = simd_sum(total);
float sums[PER];
UNROLL for (int i = 0; i < PER; ++i) sums[i] = 0.0f;
for (int b = 0; b < BLOCKS_EACH; ++b) {
    int block = group + 32 * b;
    float weight = metal::fast::exp(row_tops[block] - top);
    size_t at = (row * BLOCKS + block) * V + lane * PER;
    UNROLL for (int i = 0; i < PER; ++i) sums[i] += weight * static_cast<float>(partial[at + i]);
}
UNROLL for (int i = 0; i < PER; ++i) {
    columns[lane * 32 + group] = sums[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float sum = simd_sum(columns[group * 32 + lane]);
    if (lane == 0) {
        out[row * V + group * PER + i] = static_cast<T>(total == 0.0f ? sum : sum / total);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}
