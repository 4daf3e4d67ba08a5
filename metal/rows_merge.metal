// Second pass: the parts of a row put together. A thread per row and column. A sink is a score that
// has no value: it joins the sum of weights only. A row that sees nothing is zero.
const int parts = tops_shape[1], V = partial_shape[2];
const int row = thread_position_in_grid.y, column = thread_position_in_grid.x;
const int head = row / queries_shape[2] % queries_shape[1];
float top = SINKS ? static_cast<float>(sinks[head]) : -FLT_MAX;
for (int p = 0; p < parts; ++p) top = max(top, tops[row * parts + p]);
float total = SINKS ? metal::exp(static_cast<float>(sinks[head]) - top) : 0.0f;
float sum = 0.0f;
for (int p = 0; p < parts; ++p) {
    float weight = metal::exp(tops[row * parts + p] - top);
    total += weight * totals[row * parts + p];
    sum += weight * partial[(static_cast<size_t>(row) * parts + p) * V + column];
}
out[static_cast<size_t>(row) * V + column] = static_cast<T>(total == 0.0f ? 0.0f : sum / total);
