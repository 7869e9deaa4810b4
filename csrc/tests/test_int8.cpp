// int8_linear.cpp: against plain sums; and no token's result depends on the others.
#include <cmath>
#include <random>

#include "int8/int8_linear.h"
#include "tests/check.h"

using sgl_int8::is_supported;
using sgl_int8::linear;
using sgl_int8::Shape;

namespace {

// Vectors of the exact size, so that AddressSanitizer sees a step outside.
struct Layer {
  Shape shape;
  std::vector<float> x;
  std::vector<std::int8_t> w;
  std::vector<float> scale;

  std::vector<float> run() const {
    std::vector<float> out(shape.num_tokens * shape.size_out, -7.0F);
    linear(x.data(), w.data(), scale.data(), out.data(), shape, 0, shape.size_out);
    return out;
  }

  double exact(std::size_t token, std::size_t row) const {
    double sum = 0;
    for (std::size_t i = 0; i < shape.size_in; ++i) {
      sum += static_cast<double>(x[token * shape.size_in + i]) * w[row * shape.size_in + i];
    }
    return sum * scale[row];
  }
};

Layer make_layer(const Shape& shape, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Layer layer{shape, {}, {}, {}};
  for (std::size_t i = 0; i < shape.num_tokens * shape.size_in; ++i) {
    layer.x.push_back(normal(random));
  }
  for (std::size_t i = 0; i < shape.size_out * shape.size_in; ++i) {
    layer.w.push_back(static_cast<std::int8_t>(static_cast<int>(random() % 255) - 127));
  }
  for (std::size_t i = 0; i < shape.size_out; ++i) layer.scale.push_back(0.01F + normal(random));
  return layer;
}

// Whole steps and remainders of tokens, inputs, and rows in a tile, a block and beyond.
const std::size_t kTokens[] = {1, 2, 3, 4, 5, 6, 7, 8, 11};
const std::size_t kInputs[] = {1, 15, 31, 32, 33, 64, 176};
const std::size_t kRows[] = {1, 2, 3, 4, 95, 96, 97, 200};

}  // namespace

TEST(every_output_is_the_sum_of_its_products) {
  if (!is_supported()) return;
  for (const std::size_t tokens : kTokens) {
    for (const std::size_t inputs : kInputs) {
      for (const std::size_t rows : kRows) {
        const Layer layer = make_layer({tokens, inputs, rows}, 1);
        const std::vector<float> out = layer.run();
        for (std::size_t t = 0; t < tokens; ++t) {
          for (std::size_t r = 0; r < rows; ++r) {
            const double exact = layer.exact(t, r);
            const double room = 1e-5 * 127 * std::fabs(layer.scale[r]) * (1 + std::sqrt(inputs));
            CHECK(std::fabs(out[t * rows + r] - exact) <= room);
          }
        }
      }
    }
  }
}

TEST(a_token_is_computed_alike_alone_and_among_others) {
  if (!is_supported()) return;
  for (const std::size_t inputs : kInputs) {
    const Layer all = make_layer({11, inputs, 97}, 2);
    for (const std::size_t tokens : kTokens) {
      Layer few = all;
      few.shape.num_tokens = tokens;
      few.x.assign(all.x.end() - static_cast<std::ptrdiff_t>(tokens * inputs), all.x.end());
      const std::vector<float> among = all.run();
      const std::vector<float> found = few.run();
      const std::size_t first = (11 - tokens) * 97;
      for (std::size_t i = 0; i < found.size(); ++i) CHECK(found[i] == among[first + i]);
    }
  }
}

TEST(rows_that_another_thread_computes_are_left_alone) {
  if (!is_supported()) return;
  const Layer layer = make_layer({3, 64, 200}, 3);
  const std::vector<float> whole = layer.run();
  std::vector<float> parts(whole.size(), -7.0F);
  linear(layer.x.data(), layer.w.data(), layer.scale.data(), parts.data(), layer.shape, 50, 151);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::size_t row = i % 200;
    CHECK(parts[i] == (row >= 50 && row < 151 ? whole[i] : -7.0F));
  }
}
