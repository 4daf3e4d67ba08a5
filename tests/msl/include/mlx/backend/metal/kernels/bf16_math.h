// In place of MLX's: overloads of the math functions for bfloat16_t, which call Apple's intrinsics.
#pragma once
