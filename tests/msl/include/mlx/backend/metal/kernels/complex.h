// In place of MLX's, whose constructors are marked `thread`: clang's OpenCL mode makes temporaries in
// no address space and would not find them. No operators.
#pragma once
template <typename T>
struct complex_t {
  T real, imag;
  constexpr complex_t(T re, T im) : real(re), imag(im) {}
};
using complex32_t = complex_t<half>;
using complex64_t = complex_t<float>;
