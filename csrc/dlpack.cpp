#include "dlpack.h"


namespace sgl_vmm {

// The layout is DLPack's; the field names are ours.
struct DlpackDevice {
  std::int32_t type;
  std::int32_t id;
};

struct DlpackDtype {
  std::uint8_t code;
  std::uint8_t num_bits;
  std::uint16_t num_lanes;
};

struct DlpackTensor {
  void* data;
  DlpackDevice device;
  std::int32_t num_dims;
  DlpackDtype dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // null = dense, row-major
  std::uint64_t byte_offset;
  void* owner;
  void (*deleter)(DlpackTensor*);
};

namespace {

struct Owner {
  std::shared_ptr<VirtualTensor> tensor;
  std::vector<std::int64_t> shape;
};

DlpackDtype dtype_of(const std::string& name) {
  if (name == "float32") return {2, 32, 1};
  if (name == "float16") return {2, 16, 1};
  if (name == "bfloat16") return {4, 16, 1};
  throw VmmError(ErrorKind::kInvalidArgument,
                 "dtype \"" + name + "\": choose float32, float16 or bfloat16");
}

void check_fills(const VirtualTensor& tensor, const std::vector<std::int64_t>& shape,
                 std::size_t element_bytes) {
  std::size_t num_bytes = element_bytes;
  for (const std::int64_t size : shape) {
    if (size <= 0 || num_bytes > kNoLimit / static_cast<std::size_t>(size)) {
      throw VmmError(ErrorKind::kInvalidArgument, "a tensor's sizes are positive");
    }
    num_bytes *= static_cast<std::size_t>(size);
  }
  const std::size_t wanted = tensor.num_slots() * tensor.slot_bytes();
  if (shape.empty() || num_bytes != wanted ||
      static_cast<std::size_t>(shape[0]) != tensor.num_slots()) {
    throw VmmError(ErrorKind::kInvalidArgument,
                   "the shape has " + std::to_string(num_bytes) + " bytes, " +
                       std::to_string(tensor.num_slots()) + " slots have " +
                       std::to_string(wanted));
  }
}

}  // namespace

DlpackTensor* make_dlpack(std::shared_ptr<VirtualTensor> tensor, std::vector<std::int64_t> shape,
                          const std::string& dtype) {
  const DlpackDtype element = dtype_of(dtype);
  check_fills(*tensor, shape, element.num_bits / 8);
  auto owner = std::make_unique<Owner>(Owner{std::move(tensor), std::move(shape)});
  auto made = std::make_unique<DlpackTensor>();
  const Backend& backend = owner->tensor->backend();
  made->data = reinterpret_cast<void*>(owner->tensor->address());
  made->device = {static_cast<std::int32_t>(backend.device_type()), backend.device_id()};
  made->num_dims = static_cast<std::int32_t>(owner->shape.size());
  made->dtype = element;
  made->shape = owner->shape.data();
  made->strides = nullptr;
  made->byte_offset = 0;
  made->owner = owner.release();
  made->deleter = &delete_dlpack;
  return made.release();
}

void delete_dlpack(DlpackTensor* tensor) {
  delete static_cast<Owner*>(tensor->owner);
  delete tensor;
}

}  // namespace sgl_vmm
