// The operators sgl_esft::reroute, reroute_out and reroute_rows for torch's CPU tensors.
//
//   torch.ops.sgl_esft.reroute(...) -> checks of the tensors -> reroute.h
//
// kernels/op.py defines them and documents what they do; kernels/reroute_cpu.py loads this library.
// Against torch's own C++ interface and not its stable one: that makes a new tensor for each
// argument, which for one token takes as long as the rest of the call.
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <limits>

#include "reroute/reroute.h"

namespace {

using at::ScalarType;
using at::Tensor;

bool is_plain(const Tensor& tensor, int64_t num_dims, ScalarType dtype) {
  return tensor.dim() == num_dims && tensor.scalar_type() == dtype && tensor.is_cpu() &&
         tensor.is_contiguous();
}

// Always inline is what reroute_rows calls, too: with two callers the compiler would not do it by
// itself, and rerouting without `where` would be other code than it was. For one token that counts.
C10_ALWAYS_INLINE bool is_map(const Tensor& tensor) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  return is_plain(tensor, 2, at::kInt) && tensor.numel() > 0 && tensor.size(0) <= kMost &&
         tensor.size(1) <= kMost;
}

// Which tensor it is and why, check_reroute_inputs of kernels/checks.py says.
C10_ALWAYS_INLINE void check_tensors(const Tensor& topk_ids, const Tensor& token_adapter_slots,
                                     const Tensor& expert_map, const Tensor& out) {
  const ScalarType dtype = topk_ids.scalar_type();
  TORCH_CHECK_VALUE(
      (dtype == at::kInt || dtype == at::kLong) && is_plain(topk_ids, 2, dtype) &&
          is_plain(out, 2, dtype) && out.sizes() == topk_ids.sizes() &&
          is_plain(token_adapter_slots, 1, at::kInt) &&
          token_adapter_slots.size(0) == topk_ids.size(0) && is_map(expert_map),
      "reroute: a tensor has a shape, dtype, device or layout that the operator does not take");
}

C10_ALWAYS_INLINE sgl_reroute::Shape shape_of(const Tensor& topk_ids, const Tensor& expert_map) {
  const auto size = [](const Tensor& tensor, int64_t dim) {
    return static_cast<std::size_t>(tensor.size(dim));
  };
  return {size(topk_ids, 0), size(topk_ids, 1), size(expert_map, 0), size(expert_map, 1)};
}

template <typename Id>
void reroute_ids(const Tensor& topk_ids, const Tensor& token_adapter_slots,
                 const Tensor& expert_map, const Tensor& out) {
  const sgl_reroute::Shape shape = shape_of(topk_ids, expert_map);
  try {
    sgl_reroute::reroute(topk_ids.const_data_ptr<Id>(),
                         token_adapter_slots.const_data_ptr<int32_t>(),
                         expert_map.const_data_ptr<int32_t>(), out.mutable_data_ptr<Id>(), shape);
  } catch (const sgl_reroute::BadValueError& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

void reroute_out(const Tensor& topk_ids, const Tensor& token_adapter_slots,
                 const Tensor& expert_map, const Tensor& out) {
  check_tensors(topk_ids, token_adapter_slots, expert_map, out);
  const bool is_int = topk_ids.scalar_type() == at::kInt;
  const auto run = is_int ? reroute_ids<int32_t> : reroute_ids<int64_t>;
  run(topk_ids, token_adapter_slots, expert_map, out);
}

Tensor reroute(const Tensor& topk_ids, const Tensor& token_adapter_slots,
               const Tensor& expert_map) {
  // Not at::empty_like: for one token a call through the dispatcher is a third of the time.
  Tensor out = at::detail::empty_cpu(topk_ids.sizes(), topk_ids.scalar_type());
  reroute_out(topk_ids, token_adapter_slots, expert_map, out);
  return out;
}

void check_where(const Tensor& where) {
  TORCH_CHECK_VALUE(is_plain(where, 1, at::kInt) && where.numel() > 0,
                    "reroute: `where` has a shape, dtype, device or layout that the operator does "
                    "not take");
}

template <typename Id>
void reroute_ids_to_rows(const Tensor& topk_ids, const Tensor& token_adapter_slots,
                         const Tensor& expert_map, const Tensor& where, const Tensor& out) {
  const sgl_reroute::Shape shape = shape_of(topk_ids, expert_map);
  const sgl_reroute::Where rows{where.const_data_ptr<int32_t>(),
                                static_cast<std::size_t>(where.size(0))};
  try {
    sgl_reroute::reroute_rows(topk_ids.const_data_ptr<Id>(),
                              token_adapter_slots.const_data_ptr<int32_t>(),
                              expert_map.const_data_ptr<int32_t>(), rows,
                              out.mutable_data_ptr<Id>(), shape);
  } catch (const std::out_of_range& error) {  // BadValueError, NoRowError
    TORCH_CHECK_VALUE(false, error.what());
  }
}

void reroute_rows(const Tensor& topk_ids, const Tensor& token_adapter_slots,
                  const Tensor& expert_map, const Tensor& where, const Tensor& out) {
  check_tensors(topk_ids, token_adapter_slots, expert_map, out);
  check_where(where);
  const bool is_int = topk_ids.scalar_type() == at::kInt;
  const auto run = is_int ? reroute_ids_to_rows<int32_t> : reroute_ids_to_rows<int64_t>;
  run(topk_ids, token_adapter_slots, expert_map, where, out);
}

}  // namespace

TORCH_LIBRARY_IMPL(sgl_esft, CPU, library) {
  library.impl("reroute", &reroute);
  library.impl("reroute_out", &reroute_out);
  library.impl("reroute_rows", &reroute_rows);
}
