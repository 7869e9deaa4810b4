// Rerouting on a CPU: each token's expert ids, looked up in its adapter's row of the expert map.
//
//   topk_ids, token_adapter_slots -> every value checked -> expert_map[row, id] -> out
//                                    reroute_rows: every slot, too -> where[slot] -> out
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

// A row of a table `where` that is not there: the slot's expert lies in a lower tier now. Any other
// negative row is refused alike; -1 would be another rank's, which every MoE kernel skips.
constexpr std::int32_t kNotHere = -2;  // NOT_HERE of kernels/checks.py

// The row of a smaller expert tensor that each slot's expert lies in, or kNotHere.
struct Where {
  const std::int32_t* rows;  // [num_slots]
  std::size_t num_slots;     // at least 1
};

// An expert is asked for whose slot has no row. The message names token, expert id and slot:
// "token 5 asks for expert 17: its slot 81 is not here, where[81] is -2".
class NoRowError : public std::out_of_range {
 public:
  NoRowError(std::size_t token, std::int64_t expert, std::int32_t slot, const std::string& why)
      : std::out_of_range("token " + std::to_string(token) + " asks for expert " +
                          std::to_string(expert) + ": its slot " + std::to_string(slot) + " " +
                          why),
        token(token),
        expert(expert),
        slot(slot) {}

  const std::size_t token;
  const std::int64_t expert;
  const std::int32_t slot;
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

// The same, and then out[t, k] = where[out[t, k]] unless that is -1. The map's slots are virtual.
//
// Throws BadValueError as above, and NoRowError for the first expert whose slot is not in
// -1..num_slots-1 or has no row; then nothing has been written and nothing outside a table has been
// read. No other thread may change `where` during the call.
template <typename Id>
void reroute_rows(const Id* topk_ids, const std::int32_t* token_adapter_slots,
                  const std::int32_t* expert_map, const Where& where, Id* out, const Shape& shape);

extern template void reroute(const std::int32_t*, const std::int32_t*, const std::int32_t*,
                             std::int32_t*, const Shape&);
extern template void reroute(const std::int64_t*, const std::int32_t*, const std::int32_t*,
                             std::int64_t*, const Shape&);
extern template void reroute_rows(const std::int32_t*, const std::int32_t*, const std::int32_t*,
                                  const Where&, std::int32_t*, const Shape&);
extern template void reroute_rows(const std::int64_t*, const std::int32_t*, const std::int32_t*,
                                  const Where&, std::int64_t*, const Shape&);

}  // namespace sgl_reroute
