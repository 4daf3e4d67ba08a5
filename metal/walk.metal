// One threadgroup of TG threads. Row 0 is `first`, row 1 + (t - 1) K + i is T_t[i]: all rows move
// at once, then one thread follows the moves. Inputs come with strides: a broadcast is not copied.
threadgroup ushort moves[31 * 32];
threadgroup ushort chosen[32];
const uint M = noise_shape[0], K = noise_shape[1];
uint tid = thread_position_in_threadgroup.x;
uint lane = thread_index_in_simdgroup;

for (uint row = tid; row < 1 + (M - 1) * K; row += TG) {
    uint t = row == 0 ? 0 : 1 + (row - 1) / K;
    uint i = row == 0 ? 0 : (row - 1) % K;
    float best = -INFINITY;
    ushort at = 0;
    for (uint j = 0; j < K; ++j) {
        float score = t == 0 ? first[j * first_strides[0]]
                             : transitions[(t - 1) * transitions_strides[0]
                                   + i * transitions_strides[1] + j * transitions_strides[2]];
        score += noise[t * noise_strides[0] + j * noise_strides[1]];
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
if (tid < M) path[tid] = chosen[tid];

for (uint t = simdgroup_index_in_threadgroup; t < M; t += TG / 32) {
    float x = -INFINITY;
    if (lane < K) {
        x = t == 0 ? first[lane * first_strides[0]]
                   : transitions[(t - 1) * transitions_strides[0]
                         + chosen[t - 1] * transitions_strides[1] + lane * transitions_strides[2]];
    }
    float top = simd_max(x);
    float e = lane < K ? metal::exp((x - top) * scale) : 0.0f;
    float total = simd_sum(e);
    if (lane < K) probs[t * K + lane] = e / total;
}
