// One threadgroup of TG threads per slot of all texts. Row t - 1 of y and products is the predecessor
// of a text's row t.
threadgroup float own_sums[TG / 32];
threadgroup float previous_sums[TG / 32];
const uint M = y_shape[1], R = y_shape[2], A = bias_shape[0];
uint row = threadgroup_position_in_grid.x;
uint tid = thread_position_in_threadgroup.x;
uint lane = thread_index_in_simdgroup;
uint group = simdgroup_index_in_threadgroup;
bool first = row % M == 0;  // its predecessor is the anchor, whose products come ready

float own = 0.0f, previous = 0.0f;
for (uint d = tid; d < R; d += TG) {
    float now = static_cast<float>(y[row * R + d]);
    float before = first ? 0.0f : static_cast<float>(y[(row - 1) * R + d]);
    own += now * now;
    previous += before * before;
}
own = threadgroup_sum(own, own_sums, lane, group, TG / 32);
previous = threadgroup_sum(previous, previous_sums, lane, group, TG / 32);
float root = metal::precise::sqrt(static_cast<float>(R));
float s = root / max(metal::precise::sqrt(own), 1e-12f);
float s_previous = root / max(metal::precise::sqrt(previous), 1e-12f);

for (uint d = tid; d < A; d += TG) {
    float q = s * static_cast<float>(products[row * 3 * A + d]) + static_cast<float>(bias[d]);
    float p, m;
    if (first) {
        p = static_cast<float>(anchor[row / M * 2 * A + d]);
        m = static_cast<float>(anchor[row / M * 2 * A + A + d]);
    } else {
        p = s_previous * static_cast<float>(products[(row - 1) * 3 * A + A + d]);
        m = s_previous * static_cast<float>(products[(row - 1) * 3 * A + 2 * A + d]);
    }
    receiver[row * A + d] = static_cast<T>(q);
    message[row * A + d] = static_cast<T>(m / (1.0f + metal::exp(-(q + p))));
}
