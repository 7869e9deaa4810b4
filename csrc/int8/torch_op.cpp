// The operators sgl_esft::int8_linear and int8_linear_is_supported for torch's CPU tensors.
//
//   torch.ops.sgl_esft.int8_linear(x, w, scale) -> checks -> x in float32 -> torch's threads, each
//       some rows of w -> int8_linear.h
//
// kernels/reroute_cpu.py documents what they do. Registered with the library of reroute/torch_op.cpp.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "int8/int8_linear.h"

namespace {

using at::Tensor;

// Fewer are not worth another thread.
constexpr int64_t kRowsOfThread = 256;

void check_tensors(const Tensor& x, const Tensor& w, const Tensor& scale) {
  const auto is_plain = [](const Tensor& tensor, int64_t num_dims) {
    return tensor.dim() == num_dims && tensor.is_cpu() && tensor.is_contiguous();
  };
  TORCH_CHECK_VALUE(is_plain(x, 2) && x.is_floating_point() && is_plain(w, 2) &&
                        w.scalar_type() == at::kChar && is_plain(scale, 1) &&
                        scale.scalar_type() == at::kFloat && x.size(1) == w.size(1) &&
                        scale.size(0) == w.size(0),
                    "int8_linear: a tensor has a shape, dtype, device or layout that the operator "
                    "does not take");
  TORCH_CHECK(sgl_int8::is_supported(), "int8_linear: this processor has no AVX-512");
}

Tensor int8_linear(const Tensor& x, const Tensor& w, const Tensor& scale) {
  check_tensors(x, w, scale);
  const Tensor inputs = x.to(at::kFloat);
  Tensor out = at::empty({x.size(0), w.size(0)}, x.options().dtype(at::kFloat));
  const sgl_int8::Shape shape{static_cast<std::size_t>(x.size(0)),
                              static_cast<std::size_t>(x.size(1)),
                              static_cast<std::size_t>(w.size(0))};
  const float* from = inputs.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, w.size(0), kRowsOfThread, [&](int64_t first, int64_t last) {
    sgl_int8::linear(from, w.const_data_ptr<int8_t>(), scale.const_data_ptr<float>(), to, shape,
                     static_cast<std::size_t>(first), static_cast<std::size_t>(last));
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(sgl_esft, library) {
  library.def("int8_linear(Tensor x, Tensor w, Tensor scale) -> Tensor");
  library.def("int8_linear_is_supported() -> bool", [] { return sgl_int8::is_supported(); });
}

TORCH_LIBRARY_IMPL(sgl_esft, CPU, library) { library.impl("int8_linear", &int8_linear); }
