// A threadgroup serves one slot t and G predecessors, one simdgroup each. The K head rows pass
// through threadgroup memory COLUMNS columns at a time, unpacked once for all G predecessors.
threadgroup float tile[K * COLUMNS];
threadgroup float sums[G];
const uint D = weight_shape[0];
uint tid = thread_position_in_threadgroup.x;
uint lane = thread_index_in_simdgroup;
uint group = simdgroup_index_in_threadgroup;
uint t = threadgroup_position_in_grid.y;
uint i = threadgroup_position_in_grid.x * G + group;
bool live = i < K;  // K need not be a multiple of G

float sum = 0.0f;
for (uint d = tid; d < D; d += G * 32) {
    float x = static_cast<float>(u[t * D + d]);
    sum += x * x;
}
float rms = metal::precise::sqrt(threadgroup_sum(sum, sums, lane, group, G) / D);

constexpr uint PACKED = packed_columns<BITS>();
float dots[K];
for (int j = 0; j < K; ++j) dots[j] = 0.0f;
sum = 0.0f;
for (uint start = 0; start < D; start += COLUMNS) {
    uint columns = min(static_cast<uint>(COLUMNS), D - start);
    uint elements = columns / PACKED;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint e = tid; e < K * elements; e += G * 32) {
        uint j = e / elements, c = e % elements * PACKED;
        load_columns<BITS, GROUP>(
            head, scales, biases, rows[t * K + j], D, start + c, tile + j * COLUMNS + c);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint c = lane; live && c < columns; c += 32) {
        uint d = start + c;
        float x = static_cast<float>(u[t * D + d])
            + rms * static_cast<float>(write[(t * K + i) * D + d]);
        sum += x * x;
        x *= static_cast<float>(weight[d]);
        for (int j = 0; j < K; ++j) dots[j] += x * tile[j * COLUMNS + c];
    }
}
float scale = metal::precise::rsqrt(simd_sum(sum) / D + eps);
float score = 0.0f;
for (int j = 0; j < K; ++j) {
    float dot = simd_sum(dots[j]);
    if (lane == static_cast<uint>(j)) score = dot * scale;
}
if (live && lane < K) scores[(t * K + i) * K + lane] = score;
