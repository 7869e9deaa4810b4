// Calls the kernel so that a profiler of instructions can count them.
//
//   ./count_reroute NUM_TOKENS TOP_K ID_BITS NUM_CALLS    64 experts, 20 adapter slots
//
// What a call takes is the difference of two runs that differ in NUM_CALLS.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "reroute/reroute.h"

namespace {

template <typename Id>
void call(const sgl_reroute::Shape& shape, unsigned long num_calls) {
  std::vector<Id> ids(shape.num_tokens * shape.top_k);
  std::vector<std::int32_t> slots(shape.num_tokens);
  std::vector<std::int32_t> map(shape.num_rows * shape.num_experts);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<Id>(i * 37 % 64);
  for (std::size_t t = 0; t < slots.size(); ++t) slots[t] = static_cast<std::int32_t>(t % 21) - 1;
  std::vector<Id> out(ids.size());
  for (unsigned long i = 0; i < num_calls; ++i) {
    sgl_reroute::reroute(ids.data(), slots.data(), map.data(), out.data(), shape);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "count_reroute NUM_TOKENS TOP_K ID_BITS NUM_CALLS\n");
    return 2;
  }
  const auto number = [&](int i) { return std::strtoul(argv[i], nullptr, 10); };
  const sgl_reroute::Shape shape{number(1), number(2), 21, 64};
  number(3) == 64 ? call<std::int64_t>(shape, number(4)) : call<std::int32_t>(shape, number(4));
  return 0;
}
