// Attention of L query rows, first pass: each row as MLX's vector kernels do one row with the keys it
// sees (two passes round their sums to KEPT = T, one pass keeps them in float32). A threadgroup has
// every BLOCKS-th key of a key head and ROWS rows of each of its query heads, a simdgroup each. The
// rows share each key and value while they are in registers.
constexpr int PER = D / 32, VALUES_PER = V / 32;
const int S = keys_shape[2], H = keys_shape[1], L = queries_shape[2];
const int share = queries_shape[1] / H, tiles = (L + ROWS - 1) / ROWS;
const int lane = thread_index_in_simdgroup;
const int key_head = threadgroup_position_in_grid.x / tiles;
const int first = threadgroup_position_in_grid.x % tiles * ROWS;
const int batch = threadgroup_position_in_grid.y, block = threadgroup_position_in_grid.z;
const int head = key_head * share + simdgroup_index_in_threadgroup;

float query[ROWS][PER], sums[ROWS][VALUES_PER], top[ROWS], total[ROWS];
UNROLL for (int r = 0; r < ROWS; ++r) {
    size_t at = batch * queries_strides[0] + head * queries_strides[1]
        + min(first + r, L - 1) * queries_strides[2];
    UNROLL for (int i = 0; i < PER; ++i) {
        query[r][i] = scale
            * static_cast<float>(queries[at + (lane * PER + i) * queries_strides[3]]);
    }
    UNROLL for (int i = 0; i < VALUES_PER; ++i) sums[r][i] = 0.0f;
    bool sink = SINKS && block == 0;
    top[r] = sink ? static_cast<float>(sinks[head]) : -FLT_MAX;
    total[r] = sink ? 1.0f : 0.0f;
}
for (int key = block; key < S; key += BLOCKS) {
    size_t at = batch * keys_strides[0] + key_head * keys_strides[1] + key * keys_strides[2];
    size_t value_at = batch * values_strides[0] + key_head * values_strides[1]
        + key * values_strides[2];
    T loaded[PER], value[VALUES_PER];
    UNROLL for (int i = 0; i < PER; ++i) {
        loaded[i] = keys[at + (lane * PER + i) * keys_strides[3]];
    }
    UNROLL for (int i = 0; i < VALUES_PER; ++i) {
        value[i] = values[value_at + (lane * VALUES_PER + i) * values_strides[3]];
    }
    UNROLL for (int r = 0; r < ROWS; ++r) {
        if (first + r >= L || key > S - L + first + r) continue;
        float score = 0.0f;
        UNROLL for (int i = 0; i < PER; ++i) score += query[r][i] * static_cast<float>(loaded[i]);
        score = simd_sum(score);
        float highest = max(top[r], score);
        float fade = metal::fast::exp(top[r] - highest);
        float weight = metal::fast::exp(score - highest);
        top[r] = highest;
        total[r] = total[r] * fade + weight;
        UNROLL for (int i = 0; i < VALUES_PER; ++i) {
            sums[r][i] = sums[r][i] * fade + weight * static_cast<float>(value[i]);
        }
    }
}
UNROLL for (int r = 0; r < ROWS; ++r) {
    if (first + r >= L) continue;
    size_t at = ((static_cast<size_t>(batch) * H * share + head) * L + first + r) * BLOCKS + block;
    UNROLL for (int i = 0; i < VALUES_PER; ++i) {
        partial[at * V + lane * VALUES_PER + i] = static_cast<KEPT>(sums[r][i]);
    }
    if (lane == 0) {
        tops[at] = top[r];
        totals[at] = total[r];
    }
}
