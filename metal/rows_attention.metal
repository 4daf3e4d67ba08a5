// Attention of L query rows to keys [B, H, S, D] and values [B, H, S, V], first pass: one part of the
// keys. Rows of all heads that share a key head, head by head, make tiles of 8. Each is made by SLICES
// simdgroups, as one can't hold all columns of wide heads. KEYS keys and values at a time pass through
// threadgroup memory, unpacked once for all of them.
// MASK: 0 causal, 1 boolean, 2 added to the scores.
// Writes values weighted by exp(score - top), top itself and the sum of weights.
constexpr int KEY_RUNS = D / 8, VALUE_RUNS = V / 8, STEPS = KEYS / 8;
constexpr int QUERY_TILES = KEY_RUNS / SLICES, VALUE_TILES = VALUE_RUNS / SLICES;  // of a slice
threadgroup T keys_tile[KEYS * D];
threadgroup T values_tile[KEYS * V];
threadgroup float slice_scores[SLICES > 1 ? SIMDGROUPS * KEYS * 8 : 1];
const int S = keys_shape[2], H = keys_shape[1], L = queries_shape[2];
const int share = queries_shape[1] / H, rows = share * L;
const int blocks = threadgroups_per_grid.x / H;  // of rows, where a threadgroup can't hold all
const int key_head = threadgroup_position_in_grid.x / blocks;
const int block = threadgroup_position_in_grid.x % blocks;
const int batch = threadgroup_position_in_grid.y;
const int part = threadgroup_position_in_grid.z, parts = threadgroups_per_grid.z;
const uint tid = thread_index_in_threadgroup;
const uint lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
const uint2 place = matrix_place(lane);
const int slice = group % SLICES;
const int first_query = slice * QUERY_TILES, first_value = slice * VALUE_TILES;
const uint tile = block * (simdgroups_per_threadgroup / SLICES) + group / SLICES;
const int row = tile * 8 + place.x;
const int known = min(row, rows - 1);  // beyond the last: computed, not stored
const int head = key_head * share + known / L, position = known % L;
const int last = MASK ? S - 1 : S - L + position;  // the last key the row may see
const int per_part = ((S + parts - 1) / parts + KEYS - 1) / KEYS * KEYS;
const int begin = part * per_part, end = min(S, begin + per_part);

const size_t query_at = batch * queries_strides[0] + head * queries_strides[1]
    + position * queries_strides[2];
const size_t mask_at = batch * mask_strides[0] + head * mask_strides[1]
    + position * mask_strides[2];
float query[QUERY_TILES][2], sums[VALUE_TILES][2];
UNROLL for (int e = 0; e < 2; ++e) {
    UNROLL for (int t = 0; t < QUERY_TILES; ++t) {
        size_t column = (8 * (first_query + t) + place.y + e) * queries_strides[3];
        query[t][e] = static_cast<float>(queries[query_at + column]) * scale;
    }
    UNROLL for (int t = 0; t < VALUE_TILES; ++t) sums[t][e] = 0.0f;
}
float top = -FLT_MAX, total = 0.0f;
for (int start = begin; start < end; start += KEYS) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = tid; i < KEYS * KEY_RUNS; i += 32 * simdgroups_per_threadgroup) {
        int key = start + i / KEY_RUNS, column = i % KEY_RUNS * 8;
        T loaded[8];
        UNROLL for (int c = 0; c < 8; ++c) loaded[c] = T(0.0f);
        if (key < end) {
            size_t at = batch * keys_strides[0] + key_head * keys_strides[1]
                + key * keys_strides[2];
            size_t scale_at = batch * key_scales_strides[0] + key_head * key_scales_strides[1]
                + key * key_scales_strides[2];
            load_cached<BITS, GROUP>(
                keys, at, keys_strides[3], key_scales, key_biases, scale_at, column, loaded);
        }
        UNROLL for (int c = 0; c < 8; ++c) keys_tile[8 * i + c] = loaded[c];
    }
    for (uint i = tid; i < KEYS * VALUE_RUNS; i += 32 * simdgroups_per_threadgroup) {
        int key = start + i / VALUE_RUNS, column = i % VALUE_RUNS * 8;
        T loaded[8];
        UNROLL for (int c = 0; c < 8; ++c) loaded[c] = T(0.0f);
        if (key < end) {
            size_t at = batch * values_strides[0] + key_head * values_strides[1]
                + key * values_strides[2];
            size_t scale_at = batch * value_scales_strides[0]
                + key_head * value_scales_strides[1] + key * value_scales_strides[2];
            load_cached<BITS, GROUP>(
                values, at, values_strides[3], value_scales, value_biases, scale_at, column,
                loaded);
        }
        UNROLL for (int c = 0; c < 8; ++c) values_tile[8 * i + c] = loaded[c];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    simdgroup_matrix<float, 8, 8> scores[STEPS];
    UNROLL for (int k = 0; k < STEPS; ++k) {
        scores[k] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    UNROLL for (int t = 0; t < QUERY_TILES; ++t) {
        simdgroup_matrix<float, 8, 8> left, right;
        UNROLL for (int e = 0; e < 2; ++e) left.thread_elements()[e] = query[t][e];
        UNROLL for (int k = 0; k < STEPS; ++k) {
            UNROLL for (int e = 0; e < 2; ++e) {
                int column = 8 * (first_query + t) + place.x;
                T element = keys_tile[(8 * k + place.y + e) * D + column];
                right.thread_elements()[e] = static_cast<float>(element);
            }
            simdgroup_multiply_accumulate(scores[k], left, right, scores[k]);
        }
    }
    if (SLICES > 1) {  // the slices' scores, added in one order for all of them
        UNROLL for (int k = 0; k < STEPS; ++k) {
            UNROLL for (int e = 0; e < 2; ++e) {
                slice_scores[((group * STEPS + k) * 2 + e) * 32 + lane] =
                    scores[k].thread_elements()[e];
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        UNROLL for (int k = 0; k < STEPS; ++k) {
            UNROLL for (int e = 0; e < 2; ++e) {
                float sum = 0.0f;
                UNROLL for (int s = 0; s < SLICES; ++s) {
                    int from = group - slice + s;
                    sum += slice_scores[((from * STEPS + k) * 2 + e) * 32 + lane];
                }
                scores[k].thread_elements()[e] = sum;
            }
        }
    }
    float highest = top;
    UNROLL for (int k = 0; k < STEPS; ++k) {
        UNROLL for (int e = 0; e < 2; ++e) {
            int key = start + 8 * k + place.y + e;
            bool seen = key < end && key <= last;
            size_t masked_at = mask_at + key * mask_strides[3];
            if (MASK == 1 && seen) seen = static_cast<bool>(mask[masked_at]);
            float score = seen ? scores[k].thread_elements()[e] : -INFINITY;
            if (MASK == 2 && seen) score += static_cast<float>(mask[masked_at]);
            scores[k].thread_elements()[e] = score;
            highest = max(highest, score);
        }
    }
    highest = max(highest, simd_shuffle_xor(highest, 1));  // the lanes that hold the same row
    highest = max(highest, simd_shuffle_xor(highest, 8));
    float fade = metal::exp(top - highest), sum = 0.0f;
    top = highest;
    UNROLL for (int k = 0; k < STEPS; ++k) {
        UNROLL for (int e = 0; e < 2; ++e) {
            float weight = metal::exp(scores[k].thread_elements()[e] - top);
            scores[k].thread_elements()[e] = weight;
            sum += weight;
        }
    }
    sum += simd_shuffle_xor(sum, 1);
    total = total * fade + sum + simd_shuffle_xor(sum, 8);
    UNROLL for (int t = 0; t < VALUE_TILES; ++t) {
        simdgroup_matrix<float, 8, 8> added, right;
        UNROLL for (int e = 0; e < 2; ++e) added.thread_elements()[e] = sums[t][e] * fade;
        UNROLL for (int k = 0; k < STEPS; ++k) {
            UNROLL for (int e = 0; e < 2; ++e) {
                int column = 8 * (first_value + t) + place.y + e;
                T element = values_tile[(8 * k + place.x) * V + column];
                right.thread_elements()[e] = static_cast<float>(element);
            }
            simdgroup_multiply_accumulate(added, scores[k], right, added);
        }
        UNROLL for (int e = 0; e < 2; ++e) sums[t][e] = added.thread_elements()[e];
    }
}
if (row < rows) {
    size_t at = ((static_cast<size_t>(batch) * H * share + head) * L + position) * parts + part;
    UNROLL for (int t = 0; t < VALUE_TILES; ++t) {
        UNROLL for (int e = 0; e < 2; ++e) {
            partial[at * V + 8 * (first_value + t) + place.y + e] = sums[t][e];
        }
    }
    if (slice == 0 && place.y == 0) {
        tops[at] = top;
        totals[at] = total;
    }
}
