// A tensor over a virtual tensor's addresses, in the exchange format that torch reads (DLPack 0.x,
// the ABI of dmlc/dlpack; torch_npu reads it too). Nothing is copied; the DLPack object shares
// ownership of the virtual tensor, so its addresses outlive every torch tensor on them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "virtual_tensor.h"

namespace sgl_vmm {

struct DlpackTensor;  // DLManagedTensor

constexpr const char* kDlpackName = "dltensor";

// `shape` is dense, in elements, and must fill the slots exactly; `dtype` is float32, float16 or
// bfloat16. Throws kInvalidArgument. The taker calls the object's own deleter.
DlpackTensor* make_dlpack(std::shared_ptr<VirtualTensor> tensor, std::vector<std::int64_t> shape,
                          const std::string& dtype);

// For an object that nobody took.
void delete_dlpack(DlpackTensor* tensor);

}  // namespace sgl_vmm
