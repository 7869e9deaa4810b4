// reroute.cpp: every lookup against a plain loop, values out of range, experts that are not here.
// And no allocation.
#include <cstdlib>
#include <limits>
#include <new>
#include <random>

#include "reroute/reroute.h"
#include "tests/check.h"

using sgl_reroute::BadValueError;
using sgl_reroute::kNotHere;
using sgl_reroute::NoRowError;
using sgl_reroute::reroute;
using sgl_reroute::reroute_rows;
using sgl_reroute::Shape;
using sgl_reroute::Where;

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

  void run_rows(const std::vector<std::int32_t>& where) {
    const Where rows{where.data(), where.size()};
    reroute_rows(ids.data(), slots.data(), map.data(), rows, out.data(), shape);
  }
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

// Only what a batch asks for is here, last slot first.
template <typename Id>
std::vector<std::int32_t> where_asked(const Batch<Id>& batch) {
  std::vector<std::int32_t> where(batch.map.size(), kNotHere);
  const auto last = static_cast<std::int32_t>(where.size()) - 1;
  for (const Id slot : looked_up(batch)) {
    if (slot != -1) where[static_cast<std::size_t>(slot)] = last - static_cast<std::int32_t>(slot);
  }
  return where;
}

template <typename Id>
void check_rows(Batch<Id> batch) {
  const auto where = where_asked(batch);
  auto expected = looked_up(batch);
  for (Id& slot : expected) {
    if (slot != -1) slot = where[static_cast<std::size_t>(slot)];
  }
  batch.run_rows(where);
  CHECK(batch.out == expected);
  reroute_rows(batch.ids.data(), batch.slots.data(), batch.map.data(),
               Where{where.data(), where.size()}, batch.ids.data(), batch.shape);
  CHECK(batch.ids == expected);
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
          for (int i = 0; i < 2; ++i) {
            const auto batch = make_batch<Id>(shape, ++seed);
            check_lookups(batch);
            check_rows(batch);
          }
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

// The same with `where`.
template <typename Id>
std::string error_of(Batch<Id> batch, const std::vector<std::int32_t>& where) {
  const auto before = batch.out;
  try {
    batch.run_rows(where);
  } catch (const std::out_of_range& error) {
    CHECK(batch.out == before);
    return error.what();
  }
  return "no error";
}

// Token 31 asks for expert 3, whose slot is 3 and in no tier above, and then for another such.
template <typename Id>
void check_not_here() {
  for (const std::int32_t row : {kNotHere, -1, -3, std::numeric_limits<std::int32_t>::min()}) {
    for (const std::size_t top_k : {5, 6, 8}) {
      auto batch = make_batch<Id>({40, top_k, 3, 64}, 5);
      for (Id& id : batch.ids) {
        if (id == 3 || id == 4) id = -1;
      }
      batch.slots[31] = 0;
      batch.ids[31 * top_k + 2] = 3;
      batch.ids[31 * top_k + 4] = 4;
      auto where = where_asked(batch);
      CHECK(error_of(batch, where) == "no error");
      where[3] = where[4] = row;
      CHECK(error_of(batch, where) ==
            "token 31 asks for expert 3: its slot 3 is not here, where[3] is " +
                std::to_string(row));
    }
  }
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

TEST(an_expert_that_is_not_here_is_named_and_nothing_is_written) {
  check_not_here<std::int32_t>();
  check_not_here<std::int64_t>();
}

TEST(an_expert_that_is_not_here_is_known_by_its_numbers) {
  auto batch = make_batch<std::int32_t>({1, 1, 2, 8}, 2);
  batch.slots[0] = -1;
  batch.ids[0] = 4;
  try {
    batch.run_rows(std::vector<std::int32_t>(16, kNotHere));
    CHECK(false);
  } catch (const NoRowError& error) {
    CHECK_EQ(error.token, 0u);
    CHECK_EQ(error.expert, 4);
    CHECK_EQ(error.slot, 12);  // the base's row is the last
  }
}

TEST(what_is_no_slot_needs_no_row) {
  auto batch = make_batch<std::int32_t>({2, 2, 1, 8}, 2);
  batch.ids = {-1, 2, 5, -1};  // the map has -1 for 2 and 5: another rank's
  batch.slots = {-1, -1};
  CHECK(error_of(batch, {kNotHere}) == "no error");
  batch.run_rows({kNotHere});
  CHECK(batch.out == std::vector<std::int32_t>(4, -1));
}

TEST(a_slot_that_where_does_not_have_is_named) {
  auto batch = make_batch<std::int64_t>({1, 2, 1, 8}, 2);
  batch.slots = {-1};
  batch.ids = {0, 7};
  CHECK(error_of(batch, std::vector<std::int32_t>(7, 0)) ==
        "token 0 asks for expert 7: its slot 7 must be in -1..6");
  batch.map[0] = -2;
  CHECK(error_of(batch, std::vector<std::int32_t>(7, 0)) ==
        "token 0 asks for expert 0: its slot -2 must be in -1..6");
}

TEST(bad_values_are_named_before_experts_that_are_not_here) {
  auto batch = make_batch<std::int64_t>({40, 6, 3, 64}, 2);
  const std::vector<std::int32_t> nowhere(3 * 64, kNotHere);
  batch.ids[31 * 6 + 2] = 64;
  CHECK(error_of(batch, nowhere) == "topk_ids[31, 2] is 64, must be in -1..63");
  batch.slots[17] = 2;
  CHECK(error_of(batch, nowhere) == "token_adapter_slots[17] is 2, must be in -1..1");
}

TEST(nothing_is_allocated) {
  auto batch = make_batch<std::int32_t>({133, 6, 21, 64}, 3);
  auto wide = make_batch<std::int64_t>({133, 7, 21, 64}, 3);
  const auto where = where_asked(batch);
  const auto wide_where = where_asked(wide);
  const std::size_t before = num_allocations;
  batch.run();
  wide.run();
  batch.run_rows(where);
  wide.run_rows(wide_where);
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
