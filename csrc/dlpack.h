// A tensor over a virtual tensor's or a range's addresses, in the exchange format that torch reads
// (DLPack 0.x, the ABI of dmlc/dlpack; torch_npu reads it too). Nothing is copied; it shares
// ownership of what it lies over, so its addresses outlive every torch tensor on them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "address_range.h"
#include "virtual_tensor.h"

namespace sgl_vmm {

struct DlpackTensor;  // DLManagedTensor

constexpr const char* kDlpackName = "dltensor";

// `shape` is dense, in elements, and must fill the slots exactly; `dtype` is torch's name: float64,
// float32, float16, bfloat16, int64, int32, int16, int8, uint8 or bool. Throws kInvalidArgument.
// The taker calls the object's own deleter.
DlpackTensor* make_dlpack(std::shared_ptr<VirtualTensor> tensor, std::vector<std::int64_t> shape,
                          const std::string& dtype);

// Over a part of the range, from `offset_bytes` on, which is a multiple of the element's size. No
// size is negative; {} is one element. What of it is mapped is not asked.
DlpackTensor* make_dlpack(std::shared_ptr<AddressRange> range, std::vector<std::int64_t> shape,
                          const std::string& dtype, std::size_t offset_bytes);

// For an object that nobody took.
void delete_dlpack(DlpackTensor* tensor);

}  // namespace sgl_vmm
