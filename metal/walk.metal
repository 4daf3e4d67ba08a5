// One threadgroup of TG threads per text. Row 0 is `first`, row 1 + (t - 1) K + i is T_t[i]: all rows move
// at once, then one thread follows the moves. Inputs come with strides: a broadcast is not copied.
threadgroup ushort moves[31 * 32];
threadgroup ushort chosen[32];
const uint M = noise_shape[1], K = noise_shape[2];
uint text = threadgroup_position_in_grid.y;
size_t first_at = text * first_strides[0], table_at = text * transitions_strides[0];
size_t noise_at = text * noise_strides[0];
float text_scale = scale[text * scale_strides[0]];
uint tid = thread_position_in_threadgroup.x;
uint lane = thread_index_in_simdgroup;

for (uint row = tid; row < 1 + (M - 1) * K; row += TG) {
    uint t = row == 0 ? 0 : 1 + (row - 1) / K;
    uint i = row == 0 ? 0 : (row - 1) % K;
    float best = -INFINITY;
    ushort at = 0;
    for (uint j = 0; j < K; ++j) {
        float score = t == 0 ? first[first_at + j * first_strides[1]]
                             : transitions[table_at + (t - 1) * transitions_strides[1]
                                   + i * transitions_strides[2] + j * transitions_strides[3]];
        score += noise[noise_at + t * noise_strides[1] + j * noise_strides[2]];
        if (score > best) {  // strictly: the first maximum stays
            best = score;
            at = j;
        }
    }
    moves[row] = at;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (tid == 0) {
    uint at = moves[0];
    chosen[0] = at;
    for (uint t = 1; t < M; ++t) {
        at = moves[1 + (t - 1) * K + at];
        chosen[t] = at;
    }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (tid < M) path[text * M + tid] = chosen[tid];

for (uint t = simdgroup_index_in_threadgroup; t < M; t += TG / 32) {
    float x = -INFINITY;
    if (lane < K) {
        x = t == 0 ? first[first_at + lane * first_strides[1]]
                   : transitions[table_at + (t - 1) * transitions_strides[1]
                         + chosen[t - 1] * transitions_strides[2] + lane * transitions_strides[3]];
    }
    float top = simd_max(x);
    float e = lane < K ? metal::exp((x - top) * text_scale) : 0.0f;
    float total = simd_sum(e);
    if (lane < K) probs[(text * M + t) * K + lane] = e / total;
}
