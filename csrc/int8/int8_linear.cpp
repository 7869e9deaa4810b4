#include "int8/int8_linear.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>

// Only these functions are compiled for AVX-512: the library also loads where there is none.
#define SGL_AVX512 __attribute__((target("avx512f,avx512bw")))
#define SGL_UNROLLED _Pragma("GCC unroll 8")

namespace sgl_int8 {
namespace {

// Numbers of one vector, and vectors that are summed up apart: so many additions do not wait for
// each other. Both decide the order of a sum, which must be the same for every tile.
constexpr int kLanes = 16;
constexpr int kSums = 2;
constexpr std::size_t kStep = kLanes * kSums;
// Rows of the weight that stay in the second cache while tokens pass by.
constexpr std::size_t kBlock = 96;
// Rows of the weight in a tile, by tokens. With few tokens it is one: rows are read one after the
// other, which is what the processor fetches ahead. With more, each token's values serve three.
constexpr int kFew = 1;
constexpr int kMany = 3;

SGL_AVX512 inline __m512 weights(const std::int8_t* w) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w))));
}

// T tokens by R rows of the weight, whose sums stay in registers.
template <int T, int R>
SGL_AVX512 inline void tile(const float* x, const std::int8_t* w, const float* scale, float* out,
                            const Shape& shape) {
  const std::size_t size = shape.size_in;
  __m512 sums[T][R][kSums];
  SGL_UNROLLED
  for (int t = 0; t < T; ++t) {
    SGL_UNROLLED
    for (int r = 0; r < R; ++r) {
      SGL_UNROLLED
      for (int s = 0; s < kSums; ++s) sums[t][r][s] = _mm512_setzero_ps();
    }
  }
  std::size_t i = 0;
  for (; i + kStep <= size; i += kStep) {
    SGL_UNROLLED
    for (int s = 0; s < kSums; ++s) {
      const std::size_t at = i + static_cast<std::size_t>(s) * kLanes;
      __m512 w_of[R];
      SGL_UNROLLED
      for (int r = 0; r < R; ++r) w_of[r] = weights(w + static_cast<std::size_t>(r) * size + at);
      SGL_UNROLLED
      for (int t = 0; t < T; ++t) {
        const __m512 x_of = _mm512_loadu_ps(x + static_cast<std::size_t>(t) * size + at);
        SGL_UNROLLED
        for (int r = 0; r < R; ++r) sums[t][r][s] = _mm512_fmadd_ps(x_of, w_of[r], sums[t][r][s]);
      }
    }
  }
  SGL_UNROLLED
  for (int t = 0; t < T; ++t) {
    SGL_UNROLLED
    for (int r = 0; r < R; ++r) {
      float rest = 0;
      for (std::size_t j = i; j < size; ++j) {
        const float product = x[static_cast<std::size_t>(t) * size + j] *
                              static_cast<float>(w[static_cast<std::size_t>(r) * size + j]);
        rest += product;
      }
      const float sum = _mm512_reduce_add_ps(_mm512_add_ps(sums[t][r][0], sums[t][r][1])) + rest;
      out[static_cast<std::size_t>(t) * shape.size_out + static_cast<std::size_t>(r)] =
          sum * scale[r];
    }
  }
}

template <int T, int R>
SGL_AVX512 void tiles(const float* x, const std::int8_t* w, const float* scale, float* out,
                      const Shape& shape, std::size_t num_rows) {
  std::size_t row = 0;
  for (; row + R <= num_rows; row += R) {
    tile<T, R>(x, w + row * shape.size_in, scale + row, out + row, shape);
  }
  for (; row < num_rows; ++row) {
    tile<T, 1>(x, w + row * shape.size_in, scale + row, out + row, shape);
  }
}

SGL_AVX512 void block(const float* x, const std::int8_t* w, const float* scale, float* out,
                      const Shape& shape, std::size_t num_rows) {
  const auto run = [&](auto kernel, std::size_t token) {
    kernel(x + token * shape.size_in, w, scale, out + token * shape.size_out, shape, num_rows);
  };
  std::size_t token = 0;
  for (; token + 4 <= shape.num_tokens; token += 4) run(tiles<4, kMany>, token);
  const std::size_t left = shape.num_tokens - token;
  if (left == 3) run(tiles<3, kMany>, token);
  if (left == 2) run(tiles<2, kFew>, token);
  if (left == 1) run(tiles<1, kFew>, token);
}

}  // namespace

bool is_supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
}

void linear(const float* x, const std::int8_t* w, const float* scale, float* out,
            const Shape& shape, std::size_t first_row, std::size_t last_row) {
  for (std::size_t row = first_row; row < last_row; row += kBlock) {
    const std::size_t num_rows = std::min(kBlock, last_row - row);
    block(x, w + row * shape.size_in, scale + row, out + row, shape, num_rows);
  }
}

}  // namespace sgl_int8

#else

#include <stdexcept>

namespace sgl_int8 {

bool is_supported() { return false; }

void linear(const float*, const std::int8_t*, const float*, float*, const Shape&, std::size_t,
            std::size_t) {
  throw std::logic_error("int8_linear: this processor has no AVX-512");
}

}  // namespace sgl_int8

#endif
