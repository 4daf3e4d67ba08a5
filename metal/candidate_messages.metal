// One thread per element: x over the message, y over all (slot, predecessor candidate) pairs.
const uint A = receiver_shape[1], K = rows_shape[1];
uint d = thread_position_in_grid.x;
uint pair = thread_position_in_grid.y;
size_t row = static_cast<size_t>(rows[pair]) * 2 * A;
float gate = static_cast<float>(receiver[pair / K * A + d]) + static_cast<float>(table[row + d]);
float m = static_cast<float>(table[row + A + d]);
message[pair * A + d] = static_cast<T>(m / (1.0f + metal::exp(-gate)));
