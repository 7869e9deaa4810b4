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
  std::shared_ptr<const void> memory;
  std::vector<std::int64_t> shape;
};

struct NamedDtype {
  const char* name;
  DlpackDtype dtype;
};

// DLPack's codes: 0 int, 1 unsigned, 2 float, 4 bfloat, 6 bool.
constexpr NamedDtype kDtypes[] = {
    {"float64", {2, 64, 1}}, {"float32", {2, 32, 1}}, {"float16", {2, 16, 1}},
    {"bfloat16", {4, 16, 1}}, {"int64", {0, 64, 1}},  {"int32", {0, 32, 1}},
    {"int16", {0, 16, 1}},   {"int8", {0, 8, 1}},     {"uint8", {1, 8, 1}},
    {"bool", {6, 8, 1}}};

DlpackDtype dtype_of(const std::string& name) {
  std::string known;
  for (const NamedDtype& each : kDtypes) {
    if (name == each.name) return each.dtype;
    known += std::string(known.empty() ? "" : ", ") + each.name;
  }
  throw VmmError(ErrorKind::kInvalidArgument, "dtype \"" + name + "\": choose one of " + known);
}

// Throws kInvalidArgument for a negative size or a product that is no number of bytes.
std::size_t dense_bytes(const std::vector<std::int64_t>& shape, std::size_t element_bytes) {
  std::size_t num_bytes = element_bytes;
  for (const std::int64_t size : shape) {
    if (size < 0 || (size > 0 && num_bytes > kNoLimit / static_cast<std::size_t>(size))) {
      throw VmmError(ErrorKind::kInvalidArgument,
                     "a tensor cannot have a size of " + std::to_string(size));
    }
    num_bytes *= static_cast<std::size_t>(size);
  }
  return num_bytes;
}

void check_fills(const VirtualTensor& tensor, const std::vector<std::int64_t>& shape,
                 std::size_t element_bytes) {
  const std::size_t num_bytes = dense_bytes(shape, element_bytes);
  const std::size_t wanted = tensor.num_slots() * tensor.slot_bytes();
  if (shape.empty() || num_bytes != wanted ||
      static_cast<std::size_t>(shape[0]) != tensor.num_slots()) {
    throw VmmError(ErrorKind::kInvalidArgument,
                   "the shape has " + std::to_string(num_bytes) + " bytes, " +
                       std::to_string(tensor.num_slots()) + " slots have " +
                       std::to_string(wanted));
  }
}

void check_inside(const AddressRange& range, const std::vector<std::int64_t>& shape,
                  std::size_t element_bytes, std::size_t offset_bytes) {
  const std::size_t num_bytes = dense_bytes(shape, element_bytes);
  if (offset_bytes % element_bytes != 0) {
    throw VmmError(ErrorKind::kInvalidArgument,
                   "offset " + std::to_string(offset_bytes) + " is not a multiple of the " +
                       std::to_string(element_bytes) + " bytes of an element");
  }
  if (offset_bytes > range.num_bytes() || num_bytes > range.num_bytes() - offset_bytes) {
    throw VmmError(ErrorKind::kInvalidArgument,
                   std::to_string(num_bytes) + " bytes from " + std::to_string(offset_bytes) +
                       " on are not in a range of " + std::to_string(range.num_bytes()));
  }
}

DlpackTensor* make(Owner filled, const Backend& backend, Address address, DlpackDtype dtype) {
  auto owner = std::make_unique<Owner>(std::move(filled));
  auto made = std::make_unique<DlpackTensor>();
  made->data = reinterpret_cast<void*>(address);
  made->device = {static_cast<std::int32_t>(backend.device_type()), backend.device_id()};
  made->num_dims = static_cast<std::int32_t>(owner->shape.size());
  made->dtype = dtype;
  made->shape = owner->shape.data();
  made->strides = nullptr;
  made->byte_offset = 0;
  made->owner = owner.release();
  made->deleter = &delete_dlpack;
  return made.release();
}

}  // namespace

DlpackTensor* make_dlpack(std::shared_ptr<VirtualTensor> tensor, std::vector<std::int64_t> shape,
                          const std::string& dtype) {
  const DlpackDtype element = dtype_of(dtype);
  check_fills(*tensor, shape, element.num_bits / 8);
  const VirtualTensor& over = *tensor;
  return make({std::move(tensor), std::move(shape)}, over.backend(), over.address(), element);
}

DlpackTensor* make_dlpack(std::shared_ptr<AddressRange> range, std::vector<std::int64_t> shape,
                          const std::string& dtype, std::size_t offset_bytes) {
  const DlpackDtype element = dtype_of(dtype);
  check_inside(*range, shape, element.num_bits / 8, offset_bytes);
  const AddressRange& over = *range;
  return make({std::move(range), std::move(shape)}, over.backend(),
              over.address() + offset_bytes, element);
}

void delete_dlpack(DlpackTensor* tensor) {
  delete static_cast<Owner*>(tensor->owner);
  delete tensor;
}

}  // namespace sgl_vmm
