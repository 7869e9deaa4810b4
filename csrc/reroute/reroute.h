// Rerouting on a CPU: each token's expert ids, looked up in its adapter's row of the expert map.
//
//   topk_ids, token_adapter_slots -> every value checked -> expert_map[row, id] -> out
//
// Plain C++17: pointers and sizes, no torch, no Python, no allocation. ExpertWeave section 4.3 has
// the operator; kernels/op.py has the contract that torch_op.cpp binds this to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace sgl_reroute {

// Sizes of one call. num_rows is the number of adapter slots plus the base's row, which is last.
// num_rows and num_experts are in 1..2^31-1.
struct Shape {
  std::size_t num_tokens;
  std::size_t top_k;
  std::size_t num_rows;
  std::size_t num_experts;
};

// A value that the map has no cell for: the caller's defect. The message names tensor, position,
// value and range: "topk_ids[5, 2] is 64, must be in -1..63".
class BadValueError : public std::out_of_range {
 public:
  BadValueError(const std::string& where, std::int64_t value, std::size_t end)
      : std::out_of_range(where + " is " + std::to_string(value) + ", must be in -1.." +
                          std::to_string(static_cast<std::int64_t>(end) - 1)),
        where(where),
        value(value) {}

  const std::string where;  // "topk_ids[5, 2]" or "token_adapter_slots[5]"
  const std::int64_t value;
};

// out[t, k] = expert_map[token_adapter_slots[t], topk_ids[t, k]], and -1 where the id is -1.
//
//   topk_ids, out         [num_tokens, top_k], Id is int32 or int64
//   token_adapter_slots   [num_tokens], -1 = the last row
//   expert_map            [num_rows, num_experts]
//
// All row after row without gaps. `out` may be `topk_ids` and may not overlap anything otherwise.
// Throws BadValueError for the first value out of range, slots before ids; then nothing has been
// written and nothing outside the map has been read.
template <typename Id>
void reroute(const Id* topk_ids, const std::int32_t* token_adapter_slots,
             const std::int32_t* expert_map, Id* out, const Shape& shape);

extern template void reroute(const std::int32_t*, const std::int32_t*, const std::int32_t*,
                             std::int32_t*, const Shape&);
extern template void reroute(const std::int64_t*, const std::int32_t*, const std::int32_t*,
                             std::int64_t*, const Shape&);

}  // namespace sgl_reroute
