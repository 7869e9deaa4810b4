// TEST ONLY: a libcuda.so.1 that checks the documented contract of cuMem* over host memory. What it
// is, and what it cannot show: simulator.h. The rules: README.md. Codes are the ones that cuda.h
// lists for each function; where it lists none for a mistake, CUDA_ERROR_INVALID_VALUE.
#include <sys/mman.h>

#include <cstring>
#include <utility>
#include <vector>

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
SIM_EXPORT abi::cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRetain;
SIM_EXPORT abi::cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxRelease_v2;
SIM_EXPORT abi::cuCtxPushCurrent_v2 cuCtxPushCurrent_v2;
SIM_EXPORT abi::cuCtxPopCurrent_v2 cuCtxPopCurrent_v2;
SIM_EXPORT abi::cuStreamSynchronize cuStreamSynchronize;
SIM_EXPORT abi::cuMemcpyDtoD_v2 cuMemcpyDtoD_v2;
SIM_EXPORT abi::cuMemcpyDtoH_v2 cuMemcpyDtoH_v2;
SIM_EXPORT abi::cuMemcpyHtoD_v2 cuMemcpyHtoD_v2;

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
      {abi::kErrorInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
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
  for (std::size_t i = 0; i < num_descs; ++i) {
    REQUIRE(descs[i].location.type == abi::kLocationDevice);
    if (!is_device(descs[i].location.id)) return abi::kErrorInvalidDevice;
    const abi::AccessFlags flags = descs[i].flags;
    REQUIRE(flags == abi::kAccessNone || flags == abi::kAccessRead ||
            flags == abi::kAccessReadWrite);
    int access = PROT_NONE;
    if (flags != abi::kAccessNone) access |= PROT_READ;
    if (flags == abi::kAccessReadWrite) access |= PROT_WRITE;
    REQUIRE(state().space.set_access(address, num_bytes, descs[i].location.id, access));
  }
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

namespace {

// A primary context is the address of its device's byte here.
char contexts[simulator::kNumDevices];

struct ThreadContexts {
  std::vector<abi::Context> stack;
  int generation = -1;
};

std::vector<abi::Context>& thread_contexts() {
  static thread_local ThreadContexts contexts_of_thread;
  if (contexts_of_thread.generation != state().generation) {
    contexts_of_thread = {{}, state().generation};
  }
  return contexts_of_thread.stack;
}

// -1 for what is no context, or one that nobody holds any more.
int device_of(abi::Context context) {
  for (int device = 0; device < simulator::kNumDevices; ++device) {
    const bool is_held = state().num_context_owners[static_cast<std::size_t>(device)] > 0;
    if (context == &contexts[device] && is_held) return device;
  }
  return -1;
}

int current_device() {
  return thread_contexts().empty() ? -1 : device_of(thread_contexts().back());
}

// What was told the device before, in order. Nothing that was unmapped meanwhile is touched.
void make_pending_copies(int device) {
  const auto& space = state().space;
  for (const simulator::PendingCopy& copy : state().pending_copies) {
    if (!space.may_access(copy.destination, copy.num_bytes, device, PROT_WRITE)) continue;
    const void* from = copy.data.data();
    if (copy.source) {
      if (!space.may_access(copy.source, copy.num_bytes, device, PROT_READ)) continue;
      from = reinterpret_cast<const void*>(copy.source);
    }
    std::memmove(reinterpret_cast<void*>(copy.destination), from, copy.num_bytes);
  }
  state().pending_copies.clear();
}

// Copies need a context on the calling thread.
#define ENTER_IN_CONTEXT(name) \
  ENTER(name);                 \
  if (current_device() < 0) return abi::kErrorInvalidContext

}  // namespace

abi::Result cuDevicePrimaryCtxRetain(abi::Context* context, abi::Device device) {
  ENTER("cuDevicePrimaryCtxRetain");
  REQUIRE(context);
  if (!is_device(device)) return abi::kErrorInvalidDevice;
  ++state().num_context_owners[static_cast<std::size_t>(device)];
  *context = &contexts[device];
  return abi::kSuccess;
}

abi::Result cuDevicePrimaryCtxRelease_v2(abi::Device device) {
  ENTER("cuDevicePrimaryCtxRelease_v2");
  if (!is_device(device)) return abi::kErrorInvalidDevice;
  int& num_owners = state().num_context_owners[static_cast<std::size_t>(device)];
  if (num_owners == 0) return abi::kErrorInvalidContext;
  --num_owners;
  return abi::kSuccess;
}

abi::Result cuCtxPushCurrent_v2(abi::Context context) {
  ENTER("cuCtxPushCurrent_v2");
  if (device_of(context) < 0) return abi::kErrorInvalidContext;
  thread_contexts().push_back(context);
  return abi::kSuccess;
}

abi::Result cuCtxPopCurrent_v2(abi::Context* context) {
  ENTER("cuCtxPopCurrent_v2");
  if (!context || thread_contexts().empty()) return abi::kErrorInvalidContext;
  *context = thread_contexts().back();
  thread_contexts().pop_back();
  return abi::kSuccess;
}

// Only tests call this and the next (tests/device.h, test_copies.cpp).
SIM_EXPORT int cuCtxSetCurrent(abi::Context context) {
  ENTER("cuCtxSetCurrent");
  if (!thread_contexts().empty()) thread_contexts().pop_back();
  if (context) thread_contexts().push_back(context);
  return abi::kSuccess;
}

SIM_EXPORT int cuCtxGetCurrent(abi::Context* context) {
  ENTER("cuCtxGetCurrent");
  REQUIRE(context);
  *context = thread_contexts().empty() ? nullptr : thread_contexts().back();
  return abi::kSuccess;
}

abi::Result cuStreamSynchronize(abi::Stream stream) {
  ENTER_IN_CONTEXT("cuStreamSynchronize");
  REQUIRE(stream == abi::kDefaultStream);
  make_pending_copies(current_device());
  return abi::kSuccess;
}

// The host does not wait for it.
abi::Result cuMemcpyDtoD_v2(abi::DevicePtr destination, abi::DevicePtr source,
                            std::size_t num_bytes) {
  ENTER_IN_CONTEXT("cuMemcpyDtoD_v2");
  const auto& space = state().space;
  REQUIRE(space.may_access(destination, num_bytes, current_device(), PROT_WRITE));
  REQUIRE(space.may_access(source, num_bytes, current_device(), PROT_READ));
  state().pending_copies.push_back({destination, source, num_bytes, {}});
  return abi::kSuccess;
}

// The host's memory may be used again when this returns; the device may have the bytes later.
abi::Result cuMemcpyHtoD_v2(abi::DevicePtr destination, const void* source,
                            std::size_t num_bytes) {
  ENTER_IN_CONTEXT("cuMemcpyHtoD_v2");
  REQUIRE(source && state().space.may_access(destination, num_bytes, current_device(), PROT_WRITE));
  const auto* bytes = static_cast<const std::uint8_t*>(source);
  state().pending_copies.push_back({destination, 0, num_bytes, {bytes, bytes + num_bytes}});
  return abi::kSuccess;
}

abi::Result cuMemcpyDtoH_v2(void* destination, abi::DevicePtr source, std::size_t num_bytes) {
  ENTER_IN_CONTEXT("cuMemcpyDtoH_v2");
  REQUIRE(destination && state().space.may_access(source, num_bytes, current_device(), PROT_READ));
  make_pending_copies(current_device());
  std::memcpy(destination, reinterpret_cast<const void*>(source), num_bytes);
  return abi::kSuccess;
}
