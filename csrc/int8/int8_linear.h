// A linear layer whose weights are int8: out[t, n] = scale[n] * sum over i of x[t, i] * w[n, i].
//
//   x [num_tokens, size_in] float32, w [size_out, size_in] int8, scale [size_out] float32
//       -> products in float32, summed up in an order that size_in alone decides -> out
//
// A token's result does not depend on the others, nor on how many there are: so a batch of several
// adapters' tokens computes what each would alone. At one token a weight is read once, in order, and
// the memory's speed is the limit; from some six tokens on it is the processor's.
//
// Plain C++17: pointers and sizes, no torch, no Python, no allocation.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sgl_int8 {

// Sizes of one call, all row after row without gaps.
struct Shape {
  std::size_t num_tokens;
  std::size_t size_in;
  std::size_t size_out;  // rows of the whole weight, which are also out's columns
};

// Whether this processor has what `linear` is made of: AVX-512 (F, BW).
bool is_supported();

// Rows first_row..last_row-1 of the weight, i.e. those columns of `out` [num_tokens, size_out]; other
// columns are not touched. Only where is_supported().
void linear(const float* x, const std::int8_t* w, const float* scale, float* out,
            const Shape& shape, std::size_t first_row, std::size_t last_row);

}  // namespace sgl_int8
