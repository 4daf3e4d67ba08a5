// One threadgroup of TG threads per row, N = ceil(D / TG) columns a thread. A text's first rows, those
// without a write, pass through and are only normalised.
threadgroup float u_sums[TG / 32];
threadgroup float h_sums[TG / 32];
const uint D = weight_shape[0], rows = block_shape[1], passed = rows - write_shape[1];
uint row = threadgroup_position_in_grid.x;
uint tid = thread_position_in_threadgroup.x;
uint slot = row % rows, written = row / rows * write_shape[1] + slot - passed;
uint lane = thread_index_in_simdgroup;
uint group = simdgroup_index_in_threadgroup;

float v[N], sum = 0.0f;
for (int n = 0; n < N; ++n) {
    uint d = tid + n * TG;
    v[n] = d < D ? static_cast<float>(block[row * D + d]) : 0.0f;
    sum += v[n] * v[n];
}
float rms = metal::precise::sqrt(threadgroup_sum(sum, u_sums, lane, group, TG / 32) / D);
sum = 0.0f;
for (int n = 0; n < N; ++n) {
    uint d = tid + n * TG;
    if (slot >= passed && d < D) {
        v[n] += rms * static_cast<float>(write[written * D + d]);
    }
    v[n] = static_cast<float>(static_cast<T>(v[n]));  // the norm reads what h holds
    sum += v[n] * v[n];
}
float scale = metal::precise::rsqrt(threadgroup_sum(sum, h_sums, lane, group, TG / 32) / D + eps);
for (int n = 0; n < N; ++n) {
    uint d = tid + n * TG;
    if (d < D) {
        h[row * D + d] = static_cast<T>(v[n]);
        normed[row * D + d] = static_cast<T>(v[n] * scale * static_cast<float>(weight[d]));
    }
}
