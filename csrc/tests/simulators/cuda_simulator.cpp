// TEST ONLY: a libcuda.so.1 that checks the documented contract of cuMem* over host memory. What it
// is, and what it cannot show: simulator.h. The rules: README.md. Codes are the ones that cuda.h
// lists for each function; where it lists none for a mistake, CUDA_ERROR_INVALID_VALUE.
#include <sys/mman.h>

#include <cstring>
#include <iterator>
#include <utility>

#include "tests/simulators/simulator.h"
#include "vmm/cuda_abi.h"

namespace abi = sgl_vmm::cuda_abi;
using simulator::Memory;
using simulator::State;
using simulator::state;

// Each definition below has to be of the type that cuda.cpp calls.
SIM_EXPORT abi::cuInit cuInit;
SIM_EXPORT abi::cuGetErrorName cuGetErrorName;
SIM_EXPORT abi::cuDeviceGet cuDeviceGet;
SIM_EXPORT abi::cuDeviceGetAttribute cuDeviceGetAttribute;
SIM_EXPORT abi::cuMemGetAllocationGranularity cuMemGetAllocationGranularity;
SIM_EXPORT abi::cuMemAddressReserve cuMemAddressReserve;
SIM_EXPORT abi::cuMemAddressFree cuMemAddressFree;
SIM_EXPORT abi::cuMemCreate cuMemCreate;
SIM_EXPORT abi::cuMemRelease cuMemRelease;
SIM_EXPORT abi::cuMemMap cuMemMap;
SIM_EXPORT abi::cuMemUnmap cuMemUnmap;
SIM_EXPORT abi::cuMemSetAccess cuMemSetAccess;
SIM_EXPORT abi::cuMemExportToShareableHandle cuMemExportToShareableHandle;
SIM_EXPORT abi::cuMemImportFromShareableHandle cuMemImportFromShareableHandle;

namespace {

// Enters one function: a fault that a test ordered comes first, then the rule of cuInit.
#define ENTER(name)                                                                \
  const simulator::Call call(name);                                                \
  if (call.fault()) return static_cast<abi::Result>(*call.fault());                \
  if (!state().is_initialized) return abi::kErrorNotInitialized

#define REQUIRE(condition) \
  if (!(condition)) return abi::kErrorInvalidValue

bool is_device(int ordinal) { return ordinal >= 0 && ordinal < simulator::kNumDevices; }

abi::Result check_prop(const abi::MemAllocationProp* prop) {
  REQUIRE(prop && prop->type == abi::kAllocationPinned);
  REQUIRE(prop->location.type == abi::kLocationDevice && !prop->win32_handle_meta_data);
  REQUIRE(prop->requested_handle_types == abi::kHandleNone ||
          prop->requested_handle_types == abi::kHandlePosixFileDescriptor);
  if (!is_device(prop->location.id)) return abi::kErrorInvalidDevice;
  if (!state().has_vmm) return abi::kErrorNotSupported;
  const bool wants_fd = prop->requested_handle_types == abi::kHandlePosixFileDescriptor;
  return wants_fd && !state().has_fd_export ? abi::kErrorNotSupported : abi::kSuccess;
}

}  // namespace

abi::Result cuInit(unsigned int flags) {
  const simulator::Call call("cuInit");
  if (call.fault()) return static_cast<abi::Result>(*call.fault());
  REQUIRE(flags == 0);
  state().is_initialized = true;
  return abi::kSuccess;
}

abi::Result cuGetErrorName(abi::Result error, const char** name) {
  constexpr std::pair<abi::Result, const char*> kNames[] = {
      {abi::kSuccess, "CUDA_SUCCESS"},
      {abi::kErrorInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
      {abi::kErrorOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {abi::kErrorNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"},
      {abi::kErrorStubLibrary, "CUDA_ERROR_STUB_LIBRARY"},
      {abi::kErrorNoDevice, "CUDA_ERROR_NO_DEVICE"},
      {abi::kErrorInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
      {abi::kErrorNotPermitted, "CUDA_ERROR_NOT_PERMITTED"},
      {abi::kErrorNotSupported, "CUDA_ERROR_NOT_SUPPORTED"},
  };
  for (const auto& [code, text] : kNames) {
    if (code != error) continue;
    *name = text;
    return abi::kSuccess;
  }
  *name = nullptr;
  return abi::kErrorInvalidValue;
}

abi::Result cuDeviceGet(abi::Device* device, int ordinal) {
  ENTER("cuDeviceGet");
  REQUIRE(device);
  if (!is_device(ordinal)) return abi::kErrorInvalidDevice;
  *device = ordinal;
  return abi::kSuccess;
}

abi::Result cuDeviceGetAttribute(int* value, abi::DeviceAttribute attribute, abi::Device device) {
  ENTER("cuDeviceGetAttribute");
  REQUIRE(value);
  if (!is_device(device)) return abi::kErrorInvalidDevice;
  REQUIRE(attribute == abi::kVirtualMemoryManagementSupported ||
          attribute == abi::kPosixFileDescriptorSupported);
  const bool asks_vmm = attribute == abi::kVirtualMemoryManagementSupported;
  *value = asks_vmm ? state().has_vmm : state().has_fd_export;
  return abi::kSuccess;
}

abi::Result cuMemGetAllocationGranularity(std::size_t* granularity,
                                          const abi::MemAllocationProp* prop,
                                          abi::GranularityOption option) {
  ENTER("cuMemGetAllocationGranularity");
  REQUIRE(granularity);
  REQUIRE(option == abi::kGranularityMinimum || option == abi::kGranularityRecommended);
  const abi::Result result = check_prop(prop);
  if (result == abi::kSuccess) *granularity = state().granularity;
  return result;
}

abi::Result cuMemAddressReserve(abi::DevicePtr* address, std::size_t num_bytes,
                                std::size_t alignment, abi::DevicePtr hint,
                                unsigned long long flags) {
  ENTER("cuMemAddressReserve");
  REQUIRE(address && num_bytes && flags == 0);
  REQUIRE(num_bytes % simulator::kHostPageBytes == 0 && hint % simulator::kHostPageBytes == 0);
  REQUIRE((alignment & (alignment - 1)) == 0);  // a power of two or zero
  *address = state().space.reserve(num_bytes, alignment, 0);
  return *address ? abi::kSuccess : abi::kErrorOutOfMemory;
}

abi::Result cuMemAddressFree(abi::DevicePtr address, std::size_t num_bytes) {
  ENTER("cuMemAddressFree");
  const auto& reservations = state().space.reservations();
  const auto found = reservations.find(address);
  REQUIRE(found != reservations.end() && found->second.num_bytes == num_bytes);
  REQUIRE(state().space.release(address));
  return abi::kSuccess;
}

abi::Result cuMemCreate(abi::MemHandle* handle, std::size_t num_bytes,
                        const abi::MemAllocationProp* prop, unsigned long long flags) {
  ENTER("cuMemCreate");
  REQUIRE(handle && num_bytes && state().is_granular(num_bytes) && flags == 0);
  const abi::Result result = check_prop(prop);
  if (result != abi::kSuccess) return result;
  if (!state().has_room(num_bytes)) return abi::kErrorOutOfMemory;
  auto memory = Memory::create(num_bytes, prop->location.id);
  if (!memory) return abi::kErrorOutOfMemory;
  // The label's permission stands for requestedHandleTypes: only such memory can be exported.
  if (prop->requested_handle_types == abi::kHandlePosixFileDescriptor) memory->allow_everyone();
  *handle = state().add_handle(std::move(memory));
  return abi::kSuccess;
}

abi::Result cuMemRelease(abi::MemHandle handle) {
  ENTER("cuMemRelease");
  REQUIRE(state().drop_handle(handle));
  return abi::kSuccess;
}

abi::Result cuMemMap(abi::DevicePtr address, std::size_t num_bytes, std::size_t offset,
                     abi::MemHandle handle, unsigned long long flags) {
  ENTER("cuMemMap");
  State& current = state();
  REQUIRE(num_bytes && current.is_granular(address) && current.is_granular(num_bytes));
  REQUIRE(offset == 0 && flags == 0);
  auto memory = current.memory_of(handle);
  REQUIRE(memory && num_bytes <= memory->num_bytes);
  REQUIRE(current.space.reservation_of(address, num_bytes));
  REQUIRE(!current.space.has_mapping(address, num_bytes));
  const bool is_mapped = current.space.map(address, num_bytes, std::move(memory), PROT_NONE);
  return is_mapped ? abi::kSuccess : abi::kErrorOutOfMemory;
}

abi::Result cuMemUnmap(abi::DevicePtr address, std::size_t num_bytes) {
  ENTER("cuMemUnmap");
  REQUIRE(state().space.is_whole_run(address, num_bytes));
  state().space.unmap(address, num_bytes);
  return abi::kSuccess;
}

abi::Result cuMemSetAccess(abi::DevicePtr address, std::size_t num_bytes,
                           const abi::MemAccessDesc* descs, std::size_t num_descs) {
  ENTER("cuMemSetAccess");
  REQUIRE(descs && num_descs && state().space.is_whole_run(address, num_bytes));
  int protection = PROT_NONE;
  for (std::size_t i = 0; i < num_descs; ++i) {
    REQUIRE(descs[i].location.type == abi::kLocationDevice);
    if (!is_device(descs[i].location.id)) return abi::kErrorInvalidDevice;
    const abi::AccessFlags flags = descs[i].flags;
    REQUIRE(flags == abi::kAccessNone || flags == abi::kAccessRead ||
            flags == abi::kAccessReadWrite);
    if (flags != abi::kAccessNone) protection |= PROT_READ;
    if (flags == abi::kAccessReadWrite) protection |= PROT_WRITE;
  }
  REQUIRE(state().space.protect(address, num_bytes, protection));
  return abi::kSuccess;
}

abi::Result cuMemExportToShareableHandle(void* shareable, abi::MemHandle handle,
                                         abi::HandleType type, unsigned long long flags) {
  ENTER("cuMemExportToShareableHandle");
  const auto memory = state().memory_of(handle);
  REQUIRE(shareable && memory && type == abi::kHandlePosixFileDescriptor && flags == 0);
  REQUIRE(memory->allows(0));
  const int fd = memory->duplicate_fd();
  REQUIRE(fd >= 0);
  *static_cast<int*>(shareable) = fd;
  return abi::kSuccess;
}

// The descriptor stays the caller's.
abi::Result cuMemImportFromShareableHandle(abi::MemHandle* handle, void* shareable,
                                           abi::HandleType type) {
  ENTER("cuMemImportFromShareableHandle");
  REQUIRE(handle && type == abi::kHandlePosixFileDescriptor);
  auto memory = Memory::import(static_cast<int>(reinterpret_cast<std::intptr_t>(shareable)));
  REQUIRE(memory);
  *handle = state().add_handle(std::move(memory));
  return abi::kSuccess;
}

// Of the rest of the driver, what tests on a device copy with (tests/device.h): one context, and
// copies that refuse an address without access.
SIM_EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
  ENTER("cuDevicePrimaryCtxRetain");
  REQUIRE(context && is_device(device));
  static int only_context;
  *context = &only_context;
  return abi::kSuccess;
}

SIM_EXPORT int cuCtxSetCurrent(void*) {
  ENTER("cuCtxSetCurrent");
  return abi::kSuccess;
}

namespace {

// Whether every byte of the range is mapped; access to it is the caller's to have set.
bool is_mapped_throughout(std::uint64_t address, std::size_t num_bytes) {
  const std::uint64_t end = address + num_bytes;
  const auto& mappings = state().space.mappings();
  while (address < end) {
    const auto after = mappings.upper_bound(address);
    if (after == mappings.begin()) return false;
    const auto& [start, mapping] = *std::prev(after);
    if (start + mapping.num_bytes <= address) return false;
    address = start + mapping.num_bytes;
  }
  return true;
}

}  // namespace

SIM_EXPORT int cuMemcpyHtoD_v2(std::uint64_t to, const void* from, std::size_t num_bytes) {
  ENTER("cuMemcpyHtoD_v2");
  REQUIRE(from && is_mapped_throughout(to, num_bytes));
  std::memcpy(reinterpret_cast<void*>(to), from, num_bytes);
  return abi::kSuccess;
}

SIM_EXPORT int cuMemcpyDtoH_v2(void* to, std::uint64_t from, std::size_t num_bytes) {
  ENTER("cuMemcpyDtoH_v2");
  REQUIRE(to && is_mapped_throughout(from, num_bytes));
  std::memcpy(to, reinterpret_cast<const void*>(from), num_bytes);
  return abi::kSuccess;
}
