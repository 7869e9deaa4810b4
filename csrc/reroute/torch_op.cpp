// The operators sgl_esft::reroute and reroute_out for torch's CPU tensors.
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

bool is_map(const Tensor& tensor) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  return is_plain(tensor, 2, at::kInt) && tensor.numel() > 0 && tensor.size(0) <= kMost &&
         tensor.size(1) <= kMost;
}

// Which tensor it is and why, check_reroute_inputs of kernels/checks.py says.
void check_tensors(const Tensor& topk_ids, const Tensor& token_adapter_slots,
                   const Tensor& expert_map, const Tensor& out) {
  const ScalarType dtype = topk_ids.scalar_type();
  TORCH_CHECK_VALUE(
      (dtype == at::kInt || dtype == at::kLong) && is_plain(topk_ids, 2, dtype) &&
          is_plain(out, 2, dtype) && out.sizes() == topk_ids.sizes() &&
          is_plain(token_adapter_slots, 1, at::kInt) &&
          token_adapter_slots.size(0) == topk_ids.size(0) && is_map(expert_map),
      "reroute: a tensor has a shape, dtype, device or layout that the operator does not take");
}

template <typename Id>
void reroute_ids(const Tensor& topk_ids, const Tensor& token_adapter_slots,
                 const Tensor& expert_map, const Tensor& out) {
  const auto size = [](const Tensor& tensor, int64_t dim) {
    return static_cast<std::size_t>(tensor.size(dim));
  };
  const sgl_reroute::Shape shape{size(topk_ids, 0), size(topk_ids, 1), size(expert_map, 0),
                                 size(expert_map, 1)};
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

}  // namespace

TORCH_LIBRARY_IMPL(sgl_esft, CPU, library) {
  library.impl("reroute", &reroute);
  library.impl("reroute_out", &reroute_out);
}
