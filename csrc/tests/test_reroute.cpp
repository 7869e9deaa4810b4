// reroute.cpp: every lookup against a plain loop, values out of range, and no allocation.
#include <cstdlib>
#include <limits>
#include <new>
#include <random>

#include "reroute/reroute.h"
#include "tests/check.h"

using sgl_reroute::BadValueError;
using sgl_reroute::reroute;
using sgl_reroute::Shape;

namespace {

std::size_t num_allocations = 0;

// Vectors of the exact size, so that AddressSanitizer sees a step outside.
template <typename Id>
struct Batch {
  Shape shape;
  std::vector<Id> ids;
  std::vector<std::int32_t> slots;
  std::vector<std::int32_t> map;
  std::vector<Id> out;

  void run() { reroute(ids.data(), slots.data(), map.data(), out.data(), shape); }
};

// Values of the map name their cell; a third of the columns is another rank's. Odd seeds draw ids
// of -1 too.
template <typename Id>
Batch<Id> make_batch(const Shape& shape, unsigned seed) {
  std::mt19937 random(seed);
  Batch<Id> batch{shape, {}, {}, {}, {}};
  const std::size_t may_be_none = seed % 2;
  for (std::size_t i = 0; i < shape.num_tokens * shape.top_k; ++i) {
    const std::size_t drawn = random() % (shape.num_experts + may_be_none);
    batch.ids.push_back(static_cast<Id>(drawn) - static_cast<Id>(may_be_none));
  }
  for (std::size_t t = 0; t < shape.num_tokens; ++t) {
    batch.slots.push_back(static_cast<std::int32_t>(random() % shape.num_rows) - 1);
  }
  for (std::size_t i = 0; i < shape.num_rows * shape.num_experts; ++i) {
    batch.map.push_back(i % shape.num_experts % 3 == 2 ? -1 : static_cast<std::int32_t>(i));
  }
  batch.out.assign(batch.ids.size(), 77);
  return batch;
}

template <typename Id>
std::vector<Id> looked_up(const Batch<Id>& batch) {
  std::vector<Id> found;
  for (std::size_t i = 0; i < batch.ids.size(); ++i) {
    const std::int32_t slot = batch.slots[i / batch.shape.top_k];
    const std::size_t row = slot == -1 ? batch.shape.num_rows - 1 : static_cast<std::size_t>(slot);
    const std::size_t cell = row * batch.shape.num_experts + static_cast<std::size_t>(batch.ids[i]);
    found.push_back(batch.ids[i] == -1 ? -1 : batch.map[cell]);
  }
  return found;
}

// Into `out`, then in place.
template <typename Id>
void check_lookups(Batch<Id> batch) {
  const auto expected = looked_up(batch);
  batch.run();
  CHECK(batch.out == expected);
  reroute(batch.ids.data(), batch.slots.data(), batch.map.data(), batch.ids.data(), batch.shape);
  CHECK(batch.ids == expected);
}

template <typename Id>
void check_all_shapes() {
  unsigned seed = 0;
  for (const std::size_t num_tokens : {0, 1, 2, 3, 7, 133}) {
    for (std::size_t top_k = 1; top_k <= 9; ++top_k) {
      for (const std::size_t num_rows : {1, 2, 21, 65}) {
        for (const std::size_t num_experts : {1, 8, 64, 160}) {
          const Shape shape{num_tokens, top_k, num_rows, num_experts};
          check_lookups(make_batch<Id>(shape, ++seed));
          check_lookups(make_batch<Id>(shape, ++seed));
        }
      }
    }
  }
}

// The error of a batch; `out` must be as it was.
template <typename Id>
std::string error_of(Batch<Id> batch) {
  const auto before = batch.out;
  try {
    batch.run();
  } catch (const BadValueError& error) {
    CHECK(batch.out == before);
    return error.what();
  }
  return "no error";
}

template <typename Id>
void check_bad_ids() {
  constexpr Id kMin = std::numeric_limits<Id>::min();
  constexpr Id kMax = std::numeric_limits<Id>::max();
  for (const Id bad : {Id{-2}, Id{64}, Id{65}, kMin, kMax, static_cast<Id>(kMin + 1)}) {
    for (const std::size_t top_k : {5, 6, 8}) {
      auto batch = make_batch<Id>({40, top_k, 3, 64}, 5);
      batch.ids[31 * top_k + 2] = bad;
      batch.ids[31 * top_k + 4] = -7;  // not the first
      CHECK(error_of(batch) ==
            "topk_ids[31, 2] is " + std::to_string(bad) + ", must be in -1..63");
    }
  }
}

TEST(every_lookup_is_the_plain_loops) {
  check_all_shapes<std::int32_t>();
  check_all_shapes<std::int64_t>();
}

TEST(an_id_out_of_range_is_named_and_nothing_is_written) {
  check_bad_ids<std::int32_t>();
  check_bad_ids<std::int64_t>();
}

TEST(an_id_beyond_32_bits_is_out_of_range) {
  auto batch = make_batch<std::int64_t>({1, 1, 1, 8}, 1);
  batch.ids[0] = std::int64_t{1} << 32;  // 0 in its lower half
  CHECK(error_of(batch) == "topk_ids[0, 0] is 4294967296, must be in -1..7");
}

TEST(an_adapter_slot_out_of_range_is_named_before_ids) {
  for (const std::int32_t bad : {-2, 2, 3, std::numeric_limits<std::int32_t>::min(),
                                 std::numeric_limits<std::int32_t>::max()}) {
    auto batch = make_batch<std::int32_t>({40, 6, 3, 64}, 5);
    batch.slots[17] = bad;
    batch.ids[0] = 64;
    CHECK(error_of(batch) ==
          "token_adapter_slots[17] is " + std::to_string(bad) + ", must be in -1..1");
  }
}

TEST(without_adapter_slots_only_the_base_is_in_range) {
  auto batch = make_batch<std::int32_t>({2, 2, 1, 8}, 5);
  CHECK(error_of(batch) == "no error");
  batch.slots[1] = 0;
  CHECK(error_of(batch) == "token_adapter_slots[1] is 0, must be in -1..-1");
}

TEST(nothing_is_allocated) {
  auto batch = make_batch<std::int32_t>({133, 6, 21, 64}, 3);
  auto wide = make_batch<std::int64_t>({133, 7, 21, 64}, 3);
  const std::size_t before = num_allocations;
  batch.run();
  wide.run();
  CHECK_EQ(num_allocations, before);
  batch.ids[0] = 64;
  CHECK(error_of(batch) != "no error");
  CHECK(num_allocations > before);  // the counter counts
}

}  // namespace

void* operator new(std::size_t size) {
  ++num_allocations;
  if (void* const memory = std::malloc(size ? size : 1)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
