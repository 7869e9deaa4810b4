// TEST ONLY: a libascendcl.so that checks the documented contract of AscendCL's virtual memory over
// host memory. What it is, and what it cannot show: simulator.h. The rules: README.md. The vendor
// documents few codes; a wrong argument is ACL_ERROR_RT_PARAM_INVALID here.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "tests/simulators/simulator.h"
#include "vmm/acl_abi.h"

namespace abi = sgl_vmm::acl_abi;
using simulator::Address;
using simulator::Memory;
using simulator::State;
using simulator::state;

// Each definition below has to be of the type that acl.cpp calls.
SIM_EXPORT abi::aclInit aclInit;
SIM_EXPORT abi::aclrtSetDevice aclrtSetDevice;
SIM_EXPORT abi::aclrtGetDevice aclrtGetDevice;
SIM_EXPORT abi::aclrtMemGetAllocationGranularity aclrtMemGetAllocationGranularity;
SIM_EXPORT abi::aclrtReserveMemAddress aclrtReserveMemAddress;
SIM_EXPORT abi::aclrtReleaseMemAddress aclrtReleaseMemAddress;
SIM_EXPORT abi::aclrtMallocPhysical aclrtMallocPhysical;
SIM_EXPORT abi::aclrtFreePhysical aclrtFreePhysical;
SIM_EXPORT abi::aclrtMapMem aclrtMapMem;
SIM_EXPORT abi::aclrtUnmapMem aclrtUnmapMem;
SIM_EXPORT abi::aclrtMemExportToShareableHandle aclrtMemExportToShareableHandle;
SIM_EXPORT abi::aclrtMemSetPidToShareableHandle aclrtMemSetPidToShareableHandle;
SIM_EXPORT abi::aclrtMemImportFromShareableHandle aclrtMemImportFromShareableHandle;
SIM_EXPORT abi::aclrtMemcpy aclrtMemcpy;

namespace {

struct ThreadDevice {
  int device_id = -1;
  int generation = -1;
};

ThreadDevice& thread_device() {
  static thread_local ThreadDevice device;
  return device;
}

bool has_device() {
  return thread_device().device_id >= 0 && thread_device().generation == state().generation;
}

// Enters one function: a fault that a test ordered comes first, then the rule of aclInit.
#define ENTER(name)                                            \
  const simulator::Call call(name);                            \
  if (call.fault()) return *call.fault();                      \
  if (!state().is_initialized) return abi::kErrorUninitialize

// Most functions need a device on the calling thread.
#define ENTER_ON_DEVICE(name) \
  ENTER(name);                \
  if (!has_device()) return abi::kErrorRtContextNull

#define REQUIRE(condition) \
  if (!(condition)) return abi::kErrorRtParamInvalid

bool is_device(std::int64_t id) { return id >= 0 && id < simulator::kNumDevices; }

std::uint64_t value_of(abi::DrvMemHandle handle) {
  return reinterpret_cast<std::uint64_t>(handle);
}

// A key is where the exporter's descriptor lies, so that any process of the same user finds it.
std::uint64_t make_key(pid_t pid, int fd) {
  return static_cast<std::uint64_t>(pid) << 32 | static_cast<std::uint32_t>(fd);
}
pid_t pid_of(std::uint64_t key) { return static_cast<pid_t>(key >> 32); }

std::shared_ptr<Memory> open_key(std::uint64_t key) {
  const std::string path = "/proc/" + std::to_string(pid_of(key)) + "/fd/" +
                           std::to_string(static_cast<std::uint32_t>(key));
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return nullptr;
  auto memory = Memory::import(fd);
  close(fd);
  return memory;
}

// One reservation never holds memory of two devices, nor created and imported memory together.
bool may_share_reservation(Address start, std::size_t num_bytes, const Memory& memory) {
  const auto& mappings = state().space.mappings();
  return std::all_of(mappings.lower_bound(start), mappings.lower_bound(start + num_bytes),
                     [&](const auto& entry) {
                       const Memory& other = *entry.second.memory;
                       return other.device_id == memory.device_id &&
                              other.is_imported == memory.is_imported;
                     });
}

abi::Error check_prop(const abi::PhysicalMemProp* prop) {
  REQUIRE(prop && prop->handle_type == abi::kHandleNone);
  REQUIRE(prop->allocation_type == abi::kAllocationPinned && prop->reserve == 0);
  REQUIRE(prop->mem_attr == abi::kHbmMemHuge || prop->mem_attr == abi::kHbmMemNormal);
  REQUIRE(prop->location.type == abi::kLocationDevice);
  if (!is_device(prop->location.id)) return abi::kErrorRtInvalidDeviceId;
  return state().has_vmm ? abi::kSuccess : abi::kErrorRtFeatureNotSupport;
}

}  // namespace

abi::Error aclInit(const char*) {
  const simulator::Call call("aclInit");
  if (call.fault()) return *call.fault();
  if (state().is_initialized) return abi::kErrorRepeatInitialize;
  state().is_initialized = true;
  return abi::kSuccess;
}

abi::Error aclrtSetDevice(std::int32_t device_id) {
  ENTER("aclrtSetDevice");
  if (!is_device(device_id)) return abi::kErrorRtInvalidDeviceId;
  thread_device() = {device_id, state().generation};
  return abi::kSuccess;
}

abi::Error aclrtGetDevice(std::int32_t* device_id) {
  ENTER_ON_DEVICE("aclrtGetDevice");
  REQUIRE(device_id);
  *device_id = thread_device().device_id;
  return abi::kSuccess;
}

abi::Error aclrtMemGetAllocationGranularity(abi::PhysicalMemProp* prop,
                                            abi::GranularityOption option,
                                            std::size_t* granularity) {
  ENTER_ON_DEVICE("aclrtMemGetAllocationGranularity");
  REQUIRE(granularity);
  REQUIRE(option == abi::kGranularityMinimum || option == abi::kGranularityRecommended);
  const abi::Error error = check_prop(prop);
  if (error == abi::kSuccess) *granularity = state().granularity;
  return error;
}

abi::Error aclrtReserveMemAddress(void** address, std::size_t num_bytes, std::size_t alignment,
                                  void* expected, std::uint64_t flags) {
  ENTER_ON_DEVICE("aclrtReserveMemAddress");
  REQUIRE(address && num_bytes && alignment == 0 && !expected);
  REQUIRE(flags == 0 || flags == 1);
  const Address reserved = state().space.reserve(num_bytes, state().granularity, flags);
  *address = reinterpret_cast<void*>(reserved);
  return reserved ? abi::kSuccess : abi::kErrorRtMemoryAllocation;
}

abi::Error aclrtReleaseMemAddress(void* address) {
  ENTER_ON_DEVICE("aclrtReleaseMemAddress");
  REQUIRE(state().space.release(reinterpret_cast<Address>(address)));
  return abi::kSuccess;
}

abi::Error aclrtMallocPhysical(abi::DrvMemHandle* handle, std::size_t num_bytes,
                               const abi::PhysicalMemProp* prop, std::uint64_t flags) {
  ENTER_ON_DEVICE("aclrtMallocPhysical");
  REQUIRE(handle && num_bytes && state().is_granular(num_bytes) && flags == 0);
  const abi::Error error = check_prop(prop);
  if (error != abi::kSuccess) return error;
  if (!state().has_room(num_bytes)) return abi::kErrorRtMemoryAllocation;
  auto memory = Memory::create(num_bytes, static_cast<int>(prop->location.id));
  if (!memory) return abi::kErrorRtMemoryAllocation;
  *handle = reinterpret_cast<void*>(state().add_handle(std::move(memory)));
  return abi::kSuccess;
}

abi::Error aclrtFreePhysical(abi::DrvMemHandle handle) {
  ENTER_ON_DEVICE("aclrtFreePhysical");
  return state().drop_handle(value_of(handle)) ? abi::kSuccess : abi::kErrorRtInvalidHandle;
}

abi::Error aclrtMapMem(void* pointer, std::size_t num_bytes, std::size_t offset,
                       abi::DrvMemHandle handle, std::uint64_t flags) {
  ENTER_ON_DEVICE("aclrtMapMem");
  State& current = state();
  const auto address = reinterpret_cast<Address>(pointer);
  if (!current.is_granular(address)) return abi::kErrorRtAddrUnaligned;
  REQUIRE(num_bytes && offset == 0 && flags == 0);
  auto memory = current.memory_of(value_of(handle));
  if (!memory) return abi::kErrorRtInvalidHandle;
  REQUIRE(num_bytes == memory->num_bytes);
  const auto* reservation = current.space.reservation_of(address, num_bytes);
  REQUIRE(reservation && reservation->second.flags == 1);  // all memory here is of huge pages
  REQUIRE(!current.space.has_mapping(address, num_bytes));
  REQUIRE(may_share_reservation(reservation->first, reservation->second.num_bytes, *memory));
  constexpr int kAccess = PROT_READ | PROT_WRITE;
  const bool is_mapped = current.space.map(address, num_bytes, std::move(memory), kAccess);
  return is_mapped ? abi::kSuccess : abi::kErrorRtMemoryAllocation;
}

abi::Error aclrtUnmapMem(void* pointer) {
  ENTER_ON_DEVICE("aclrtUnmapMem");
  const auto& mappings = state().space.mappings();
  const auto found = mappings.find(reinterpret_cast<Address>(pointer));
  REQUIRE(found != mappings.end());
  state().space.unmap(found->first, found->second.num_bytes);
  return abi::kSuccess;
}

// Of memory that was created here, once.
abi::Error aclrtMemExportToShareableHandle(abi::DrvMemHandle handle, abi::MemHandleType type,
                                           std::uint64_t flags, std::uint64_t* shareable) {
  ENTER_ON_DEVICE("aclrtMemExportToShareableHandle");
  REQUIRE(shareable && type == abi::kHandleNone);
  REQUIRE(flags == abi::kExportDefault || flags == abi::kExportDisablePidValidation);
  const auto memory = state().memory_of(value_of(handle));
  if (!memory) return abi::kErrorRtInvalidHandle;
  REQUIRE(!memory->is_imported && !state().exported_keys.count(value_of(handle)));
  if (flags == abi::kExportDisablePidValidation) memory->allow_everyone();
  *shareable = make_key(getpid(), memory->fd);
  state().exported_keys[value_of(handle)] = *shareable;
  return abi::kSuccess;
}

abi::Error aclrtMemSetPidToShareableHandle(std::uint64_t shareable, std::int32_t* pids,
                                           std::size_t num_pids) {
  ENTER_ON_DEVICE("aclrtMemSetPidToShareableHandle");
  REQUIRE(pids && num_pids);
  for (const auto& [handle, key] : state().exported_keys) {
    if (key != shareable) continue;
    REQUIRE(state().memory_of(handle)->allow({pids, pids + num_pids}));
    return abi::kSuccess;
  }
  return abi::kErrorRtParamInvalid;
}

// Never in the exporter's own process, and once in any other.
abi::Error aclrtMemImportFromShareableHandle(std::uint64_t shareable, std::int32_t device_id,
                                             abi::DrvMemHandle* handle) {
  ENTER_ON_DEVICE("aclrtMemImportFromShareableHandle");
  REQUIRE(handle && pid_of(shareable) != getpid());
  if (!is_device(device_id)) return abi::kErrorRtInvalidDeviceId;
  for (const auto& imported : state().imported_keys) REQUIRE(imported.second != shareable);
  auto memory = open_key(shareable);
  REQUIRE(memory);
  if (!memory->allows(getpid())) return abi::kErrorRtNoPermission;
  const std::uint64_t value = state().add_handle(std::move(memory));
  state().imported_keys[value] = shareable;
  *handle = reinterpret_cast<void*>(value);
  return abi::kSuccess;
}

// The kind says which side is the device's: wholly mapped there, and none of it on the host's side.
abi::Error aclrtMemcpy(void* destination, std::size_t destination_bytes, const void* source,
                       std::size_t num_bytes, abi::MemcpyKind kind) {
  ENTER_ON_DEVICE("aclrtMemcpy");
  REQUIRE(destination && source && num_bytes && num_bytes <= destination_bytes);
  REQUIRE(kind >= abi::kMemcpyHostToHost && kind <= abi::kMemcpyDeviceToDevice);
  const auto is_on = [&](const void* pointer, bool wants_device) {
    const auto address = reinterpret_cast<Address>(pointer);
    if (!wants_device) return !state().space.has_mapping(address, num_bytes);
    return state().space.may_access(address, num_bytes, thread_device().device_id, PROT_READ);
  };
  const bool to_device = kind == abi::kMemcpyHostToDevice || kind == abi::kMemcpyDeviceToDevice;
  const bool from_device = kind == abi::kMemcpyDeviceToHost || kind == abi::kMemcpyDeviceToDevice;
  REQUIRE(is_on(destination, to_device) && is_on(source, from_device));
  std::memcpy(destination, source, num_bytes);
  return abi::kSuccess;
}
