// One threadgroup of TG threads per slot, N = ceil(K K / TG) pairs (i, j) a thread. The rows of
// predecessors and successors pass through threadgroup memory COLUMNS columns at a time.
threadgroup float u[K * COLUMNS];
threadgroup float v[K * COLUMNS];
const uint R = w1_shape[1];
uint t = threadgroup_position_in_grid.x;
uint tid = thread_position_in_threadgroup.x;

float dots[N];
for (int n = 0; n < N; ++n) dots[n] = 0.0f;
for (uint start = 0; start < R; start += COLUMNS) {
    uint columns = min(static_cast<uint>(COLUMNS), R - start);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint e = tid; e < K * columns; e += TG) {
        uint k = e / columns, c = e % columns;
        size_t before = predecessors[t * K + k], after = successors[t * K + k];
        u[k * COLUMNS + c] = static_cast<float>(w1[before * R + start + c]);
        v[k * COLUMNS + c] = static_cast<float>(w2[after * R + start + c]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int n = 0; n < N; ++n) {
        uint pair = tid + n * TG;
        if (pair >= K * K) continue;
        for (uint c = 0; c < columns; ++c) {
            dots[n] += u[pair / K * COLUMNS + c] * v[pair % K * COLUMNS + c];
        }
    }
}
for (int n = 0; n < N; ++n) {
    uint pair = tid + n * TG;
    if (pair < K * K) scores[t * K * K + pair] = base[t * K + pair % K] + dots[n];
}
