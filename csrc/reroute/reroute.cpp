// See reroute.h. Two passes, because the first is nearly free: it has no branch and no lookup, so
// the compiler makes vectors of it, and an error then leaves `out` as it was.
#include "reroute/reroute.h"

#include <algorithm>
#include <type_traits>

namespace sgl_reroute {
namespace {

struct Found {
  bool bad;   // a value that is not in -1..end-1
  bool none;  // a value of -1
};

// value + 1 and last - value are both negative for no value, and one of them is for a bad one. Only
// signs are looked at, for which even baseline x86-64 has vector instructions.
template <typename Value>
Found scan(const Value* values, std::size_t count, std::size_t end) {
  using Bits = std::make_unsigned_t<Value>;
  const Bits last = static_cast<Bits>(end - 1);
  Bits bad = 0;
  Bits none = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const Bits value = static_cast<Bits>(values[i]);
    bad |= (value + 1) | (last - value);
    none |= value;
  }
  return {static_cast<Value>(bad) < 0, static_cast<Value>(none) < 0};
}

template <typename Value>
std::size_t first_bad(const Value* values, std::size_t end) {
  std::size_t i = 0;
  while (values[i] >= -1 && values[i] < static_cast<std::int64_t>(end)) ++i;
  return i;
}

[[noreturn, gnu::cold]] void throw_bad_slot(const std::int32_t* slots, std::size_t end) {
  const std::size_t i = first_bad(slots, end);
  throw BadValueError("token_adapter_slots[" + std::to_string(i) + "]", slots[i], end);
}

template <typename Id>
[[noreturn, gnu::cold]] void throw_bad_id(const Id* topk_ids, const Shape& shape) {
  const std::size_t i = first_bad(topk_ids, shape.num_experts);
  const std::string token = std::to_string(i / shape.top_k);
  throw BadValueError("topk_ids[" + token + ", " + std::to_string(i % shape.top_k) + "]",
                      topk_ids[i], shape.num_experts);
}

// kTopK is top_k where that is known at compile time, which unrolls the lookups of a token.
// An id of -1 is all ones: it reads cell 0, and the same ones make that -1.
template <std::size_t kTopK, bool kSomeAreNone, typename Id>
void look_up(const Id* ids, const std::int32_t* slots, const std::int32_t* map, Id* out,
             const Shape& shape) {
  const std::size_t top_k = kTopK ? kTopK : shape.top_k;
  const std::int32_t* const base_row = map + (shape.num_rows - 1) * shape.num_experts;
  for (std::size_t t = 0; t < shape.num_tokens; ++t, ids += top_k, out += top_k) {
    const std::size_t slot = static_cast<std::size_t>(slots[t]);
    const std::int32_t* const row = slots[t] < 0 ? base_row : map + slot * shape.num_experts;
    for (std::size_t j = 0; j < top_k; ++j) {
      const Id ones_if_none = kSomeAreNone ? ids[j] >> (8 * sizeof(Id) - 1) : 0;
      out[j] = static_cast<Id>(row[ids[j] & ~ones_if_none]) | ones_if_none;
    }
  }
}

template <bool kSomeAreNone, typename Id>
void look_up_all(const Id* ids, const std::int32_t* slots, const std::int32_t* map, Id* out,
                 const Shape& shape) {
  switch (shape.top_k) {  // those of published models; others take the loop as it is
    case 6:
      return look_up<6, kSomeAreNone>(ids, slots, map, out, shape);
    case 8:
      return look_up<8, kSomeAreNone>(ids, slots, map, out, shape);
    default:
      return look_up<0, kSomeAreNone>(ids, slots, map, out, shape);
  }
}

// Not scan, and no throw_ of the above for what this finds: with a second caller the compiler would
// no longer make them a part of reroute, whose code stays what it was without `where`.
template <typename Value>
bool all_in_range(const Value* values, std::size_t count, std::size_t end) {
  return std::all_of(values, values + count, [end](Value value) {
    return value >= -1 && value < static_cast<std::int64_t>(end);
  });
}

// Calls visit(i, slot) for the i-th id: the map's slot, -1 where the id is. A plain loop, with its
// branches: with experts in tiers the look-up is nothing beside one expert that is waited for.
template <typename Id, typename Visit>
void for_each_slot(const Id* ids, const std::int32_t* slots, const std::int32_t* map,
                   const Shape& shape, const Visit& visit) {
  std::size_t i = 0;
  for (std::size_t t = 0; t < shape.num_tokens; ++t) {
    const std::size_t row = slots[t] < 0 ? shape.num_rows - 1 : static_cast<std::size_t>(slots[t]);
    const std::int32_t* const cells = map + row * shape.num_experts;
    for (std::size_t j = 0; j < shape.top_k; ++j, ++i) visit(i, ids[i] < 0 ? -1 : cells[ids[i]]);
  }
}

bool has_slot(const Where& where, std::int32_t slot) {
  return slot >= 0 && static_cast<std::size_t>(slot) < where.num_slots;
}

template <typename Id>
[[noreturn, gnu::cold]] void throw_no_row(const Id* topk_ids, std::size_t i, std::int32_t slot,
                                          const Where& where, const Shape& shape) {
  std::string why = "must be in -1.." + std::to_string(where.num_slots - 1);
  if (has_slot(where, slot)) {
    why = "is not here, where[" + std::to_string(slot) + "] is " + std::to_string(where.rows[slot]);
  }
  throw NoRowError(i / shape.top_k, topk_ids[i], slot, why);
}

}  // namespace

template <typename Id>
void reroute(const Id* topk_ids, const std::int32_t* token_adapter_slots,
             const std::int32_t* expert_map, Id* out, const Shape& shape) {
  const std::size_t num_adapters = shape.num_rows - 1;
  if (scan(token_adapter_slots, shape.num_tokens, num_adapters).bad) {
    throw_bad_slot(token_adapter_slots, num_adapters);
  }
  const Found ids = scan(topk_ids, shape.num_tokens * shape.top_k, shape.num_experts);
  if (ids.bad) throw_bad_id(topk_ids, shape);
  const auto run = ids.none ? look_up_all<true, Id> : look_up_all<false, Id>;
  run(topk_ids, token_adapter_slots, expert_map, out, shape);
}

// Two passes here, too: `out` may be the ids, and the error's words need them.
template <typename Id>
void reroute_rows(const Id* topk_ids, const std::int32_t* token_adapter_slots,
                  const std::int32_t* expert_map, const Where& where, Id* out,
                  const Shape& shape) {
  if (!all_in_range(token_adapter_slots, shape.num_tokens, shape.num_rows - 1) ||
      !all_in_range(topk_ids, shape.num_tokens * shape.top_k, shape.num_experts)) {
    reroute(topk_ids, token_adapter_slots, expert_map, out, shape);  // names it, and writes nothing
  }
  const auto check = [&](std::size_t i, std::int32_t slot) {
    const bool has_row = has_slot(where, slot) && where.rows[slot] >= 0;
    if (!has_row && slot != -1) throw_no_row(topk_ids, i, slot, where, shape);
  };
  const auto write = [&](std::size_t i, std::int32_t slot) {
    out[i] = slot < 0 ? slot : where.rows[slot];
  };
  for_each_slot(topk_ids, token_adapter_slots, expert_map, shape, check);
  for_each_slot(topk_ids, token_adapter_slots, expert_map, shape, write);
}

template void reroute(const std::int32_t*, const std::int32_t*, const std::int32_t*,
                      std::int32_t*, const Shape&);
template void reroute(const std::int64_t*, const std::int32_t*, const std::int32_t*,
                      std::int64_t*, const Shape&);
template void reroute_rows(const std::int32_t*, const std::int32_t*, const std::int32_t*,
                           const Where&, std::int32_t*, const Shape&);
template void reroute_rows(const std::int64_t*, const std::int32_t*, const std::int32_t*,
                           const Where&, std::int64_t*, const Shape&);

}  // namespace sgl_reroute
