// The Ascend backend: AscendCL's virtual memory functions, opened by dlopen.
//
//   backend.h --> [acl.cpp] --> acl_abi.h --> libascendcl.so
//
//   reserve   aclrtReserveMemAddress           |  release   aclrtReleaseMemAddress
//   create    aclrtMallocPhysical (2 MiB HBM)  |  destroy   aclrtFreePhysical
//   map       aclrtMapMem                      |  unmap     aclrtUnmapMem
//   export, import: a number that another process of this machine turns into a handle
//   copy, peek, poke: aclrtMemcpy, which returns when it is done
//
// Two rules of the vendor that a caller meets:
// - an export and an import of the same memory are never in one process;
// - one reservation holds handles that were created here, or imported ones, never both at once.
// And one that nobody meets for it: a copy between two devices wants aclrtDeviceEnablePeerAccess.
//
// Not yet run on hardware; compiled against the vendor's headers and run over a simulator.
#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "vmm/acl_abi.h"
#include "vmm/backend.h"
#include "vmm/dynamic_library.h"
#include "vmm/mapping_table.h"

namespace sgl_vmm {
namespace {

namespace abi = acl_abi;

// aclrtReserveMemAddress takes the page size of what will be mapped there.
constexpr std::uint64_t kReserveHugePages = 1;

struct AclApi {
  explicit AclApi(const DynamicLibrary& library);

  abi::aclInit* aclInit;
  abi::aclrtSetDevice* aclrtSetDevice;
  abi::aclrtGetDevice* aclrtGetDevice;
  abi::aclrtMemGetAllocationGranularity* aclrtMemGetAllocationGranularity;
  abi::aclrtReserveMemAddress* aclrtReserveMemAddress;
  abi::aclrtReleaseMemAddress* aclrtReleaseMemAddress;
  abi::aclrtMallocPhysical* aclrtMallocPhysical;
  abi::aclrtFreePhysical* aclrtFreePhysical;
  abi::aclrtMapMem* aclrtMapMem;
  abi::aclrtUnmapMem* aclrtUnmapMem;
  abi::aclrtMemExportToShareableHandle* aclrtMemExportToShareableHandle;
  abi::aclrtMemImportFromShareableHandle* aclrtMemImportFromShareableHandle;
  abi::aclrtMemcpy* aclrtMemcpy;
};

#define LOAD(function) function(library.symbol<abi::function>(#function))

AclApi::AclApi(const DynamicLibrary& library)
    : LOAD(aclInit),
      LOAD(aclrtSetDevice),
      LOAD(aclrtGetDevice),
      LOAD(aclrtMemGetAllocationGranularity),
      LOAD(aclrtReserveMemAddress),
      LOAD(aclrtReleaseMemAddress),
      LOAD(aclrtMallocPhysical),
      LOAD(aclrtFreePhysical),
      LOAD(aclrtMapMem),
      LOAD(aclrtUnmapMem),
      LOAD(aclrtMemExportToShareableHandle),
      LOAD(aclrtMemImportFromShareableHandle),
      LOAD(aclrtMemcpy) {}

#undef LOAD

struct KnownError {
  abi::Error code;
  const char* name;
  ErrorKind kind;
};

// AscendCL has no function for the name of a code.
constexpr KnownError kKnownErrors[] = {
    {abi::kErrorInvalidParam, "ACL_ERROR_INVALID_PARAM", ErrorKind::kVendorCall},
    {abi::kErrorUninitialize, "ACL_ERROR_UNINITIALIZE", ErrorKind::kVendorCall},
    {abi::kErrorRtParamInvalid, "ACL_ERROR_RT_PARAM_INVALID", ErrorKind::kVendorCall},
    {abi::kErrorRtInvalidDeviceId, "ACL_ERROR_RT_INVALID_DEVICEID", ErrorKind::kInvalidArgument},
    {abi::kErrorRtContextNull, "ACL_ERROR_RT_CONTEXT_NULL", ErrorKind::kVendorCall},
    {abi::kErrorRtAddrUnaligned, "ACL_ERROR_RT_ADDR_UNALIGNED", ErrorKind::kVendorCall},
    {abi::kErrorRtInvalidHandle, "ACL_ERROR_RT_INVALID_HANDLE", ErrorKind::kVendorCall},
    {abi::kErrorBadAlloc, "ACL_ERROR_BAD_ALLOC", ErrorKind::kExhausted},
    {abi::kErrorApiNotSupport, "ACL_ERROR_API_NOT_SUPPORT", ErrorKind::kUnsupported},
    {abi::kErrorFeatureUnsupported, "ACL_ERROR_FEATURE_UNSUPPORTED", ErrorKind::kUnsupported},
    {abi::kErrorRtFeatureNotSupport, "ACL_ERROR_RT_FEATURE_NOT_SUPPORT", ErrorKind::kUnsupported},
    {abi::kErrorRtMemoryAllocation, "ACL_ERROR_RT_MEMORY_ALLOCATION", ErrorKind::kExhausted},
    {abi::kErrorRtNoDevice, "ACL_ERROR_RT_NO_DEVICE", ErrorKind::kUnsupported},
    {abi::kErrorRtNoPermission, "ACL_ERROR_RT_NO_PERMISSION", ErrorKind::kVendorCall},
    {abi::kErrorRtDeviceOom, "ACL_ERROR_RT_DEVICE_OOM", ErrorKind::kExhausted},
    {abi::kErrorRtInternalError, "ACL_ERROR_RT_INTERNAL_ERROR", ErrorKind::kVendorCall},
};

KnownError describe(abi::Error code) {
  for (const KnownError& known : kKnownErrors) {
    if (known.code == code) return known;
  }
  return {code, "an aclError not named here", ErrorKind::kVendorCall};
}

void check(abi::Error code, const char* call, const char* file, int line) {
  if (code == abi::kSuccess) return;
  const KnownError known = describe(code);
  throw VmmError(known.kind, "acl", call, code, known.name, file, line);
}

// Calls one function of the vendor and throws, with its name and this line, if it fails.
#define VMM_ACL(function, ...) check(api_.function(__VA_ARGS__), #function, __FILE__, __LINE__)

// The vendor's functions act on the calling thread's device and fail on a thread without one. A
// thread that has another device gets it back, with that device's default context; one that had
// none keeps ours. aclrtSetDevice is counted by the runtime, so it is called only where needed.
class DeviceScope {
 public:
  DeviceScope(const AclApi& api, int device_id) : api_(api) {
    const bool has_device = api_.aclrtGetDevice(&previous_) == abi::kSuccess;
    if (has_device && previous_ == device_id) return;
    VMM_ACL(aclrtSetDevice, device_id);
    restores_ = has_device;
  }
  ~DeviceScope() {
    if (restores_) api_.aclrtSetDevice(previous_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  const AclApi& api_;
  std::int32_t previous_ = -1;
  bool restores_ = false;
};

class AclBackend final : public Backend {
 public:
  explicit AclBackend(const BackendOptions& options)
      : api_(DynamicLibrary(options.library.empty() ? "libascendcl.so" : options.library,
                            "install CANN 8.0 or later and source its set_env.sh, "
                            "or choose the host backend")),
        device_id_(options.device_id),
        granularity_(open_device()),
        table_(name(), granularity_) {}

  ~AclBackend() override;

  const char* name() const override { return "acl"; }
  DeviceType device_type() const override { return DeviceType::kNpu; }
  int device_id() const override { return device_id_; }
  std::size_t granularity() const override { return granularity_; }

  Address reserve(std::size_t num_bytes, std::size_t alignment) override;
  void release(Address address, std::size_t num_bytes) override;
  Handle create(std::size_t num_bytes) override;
  void destroy(Handle handle) override;
  void map(Address address, std::size_t num_bytes, Handle handle) override;
  void unmap(Address address, std::size_t num_bytes) override;
  void set_access(Address address, std::size_t num_bytes) override;
  Exported export_handle(Handle handle) override;
  Handle import_handle(const Exported& exported) override;
  void copy(Address destination, Address source, std::size_t num_bytes) override;

 protected:
  void read(void* host, Address source, std::size_t num_bytes) override;
  void write(Address destination, const void* host, std::size_t num_bytes) override;

 private:
  static void* pointer(Address address) { return reinterpret_cast<void*>(address); }
  static void* pointer(Handle handle) { return reinterpret_cast<void*>(handle.value); }
  static Handle handle_of(abi::DrvMemHandle handle) {
    return Handle{reinterpret_cast<std::uint64_t>(handle)};
  }
  std::size_t open_device() const;
  abi::PhysicalMemProp prop() const;

  const AclApi api_;
  const int device_id_;
  const std::size_t granularity_;

  // Held from each check of the table, over the vendor's call, to its record; shared by copies.
  std::shared_mutex mutex_;
  MappingTable table_;
  // The vendor exports a handle once in a process and fails the second time. Guarded by mutex_.
  std::unordered_map<std::uint64_t, std::uint64_t> exported_keys_;
};

AclBackend::~AclBackend() {
  try {
    const DeviceScope scope(api_, device_id_);
    for (const auto& item : table_.mappings()) api_.aclrtUnmapMem(pointer(item.first));
    for (const auto& item : table_.memories()) {
      for (std::size_t i = 0; i < item.second.num_owners; ++i) {
        api_.aclrtFreePhysical(pointer(Handle{item.first}));
      }
    }
    for (const auto& item : table_.reservations()) {
      api_.aclrtReleaseMemAddress(pointer(item.first));
    }
  } catch (const VmmError&) {  // the process is ending and its runtime has gone first
  }
}

// The granularity; a device without virtual memory fails that question.
std::size_t AclBackend::open_device() const {
  const abi::Error code = api_.aclInit(nullptr);
  // Once in a process: torch_npu, or another backend, may have been first.
  if (code != abi::kErrorRepeatInitialize) check(code, "aclInit", __FILE__, __LINE__);
  const DeviceScope scope(api_, device_id_);
  abi::PhysicalMemProp memory = prop();
  std::size_t granularity = 0;
  VMM_ACL(aclrtMemGetAllocationGranularity, &memory, abi::kGranularityMinimum, &granularity);
  return granularity;
}

abi::PhysicalMemProp AclBackend::prop() const {
  abi::PhysicalMemProp prop{};
  prop.handle_type = abi::kHandleNone;
  prop.allocation_type = abi::kAllocationPinned;
  prop.mem_attr = abi::kHbmMemHuge;
  prop.location = {static_cast<std::uint32_t>(device_id_), abi::kLocationDevice};
  return prop;
}

Address AclBackend::reserve(std::size_t num_bytes, std::size_t alignment) {
  const std::lock_guard<std::shared_mutex> lock(mutex_);
  table_.check_reserve(num_bytes, alignment);
  const DeviceScope scope(api_, device_id_);
  void* reserved = nullptr;
  // The vendor's own alignment and place are the only ones it accepts.
  VMM_ACL(aclrtReserveMemAddress, &reserved, num_bytes, 0, nullptr, kReserveHugePages);
  const auto address = reinterpret_cast<Address>(reserved);
  if (address % std::max(alignment, granularity_)) {
    api_.aclrtReleaseMemAddress(reserved);
    throw VmmError(ErrorKind::kUnsupported,
                   "acl: aclrtReserveMemAddress cannot align to " + std::to_string(alignment) +
                       " bytes; ask for the granularity " + std::to_string(granularity_));
  }
  table_.record_reserve(address, num_bytes);
  return address;
}

void AclBackend::release(Address address, std::size_t num_bytes) {
  const std::lock_guard<std::shared_mutex> lock(mutex_);
  table_.check_release(address, num_bytes);
  const DeviceScope scope(api_, device_id_);
  VMM_ACL(aclrtReleaseMemAddress, pointer(address));
  table_.record_release(address);
}

Handle AclBackend::create(std::size_t num_bytes) {
  const std::lock_guard<std::shared_mutex> lock(mutex_);
  table_.check_create(num_bytes);
  const DeviceScope scope(api_, device_id_);
  const abi::PhysicalMemProp memory = prop();
  abi::DrvMemHandle created = nullptr;
  VMM_ACL(aclrtMallocPhysical, &created, num_bytes, &memory, 0);
  table_.record_create(handle_of(created), num_bytes);
  return handle_of(created);
}

void AclBackend::destroy(Handle handle) {
  const std::lock_guard<std::shared_mutex> lock(mutex_);
  table_.check_destroy(handle);
  const DeviceScope scope(api_, device_id_);
  VMM_ACL(aclrtFreePhysical, pointer(handle));
  table_.record_destroy(handle);
  exported_keys_.erase(handle.value);
}

void AclBackend::map(Address address, std::size_t num_bytes, Handle handle) {
  const std::lock_guard<std::shared_mutex> lock(mutex_);
  table_.check_map(address, num_bytes, handle);
  const DeviceScope scope(api_, device_id_);
  VMM_ACL(aclrtMapMem, pointer(address), num_bytes, 0, pointer(handle), 0);
  table_.record_map(address, num_bytes, handle);
  table_.record_access(address, num_bytes);  // the vendor's map gives it
}

void AclBackend::unmap(Address address, std::size_t num_bytes) {
  const std::lock_guard<std::shared_mutex> lock(mutex_);
  table_.check_unmap(address, num_bytes);
  const DeviceScope scope(api_, device_id_);
  VMM_ACL(aclrtUnmapMem, pointer(address));
  table_.record_unmap(address);
}

// aclrtMapMem has already given access to the memory's own device. The vendor's aclrtMemSetAccess
// is for another device, takes one mapping a call, and is missing from older versions.
void AclBackend::set_access(Address address, std::size_t num_bytes) {
  const std::lock_guard<std::shared_mutex> lock(mutex_);
  table_.check_mapped(address, num_bytes);
}

Exported AclBackend::export_handle(Handle handle) {
  const std::lock_guard<std::shared_mutex> lock(mutex_);
  Exported exported;
  exported.num_bytes = table_.check_handle(handle);
  const auto known = exported_keys_.find(handle.value);
  if (known != exported_keys_.end()) {
    exported.key = known->second;
    return exported;
  }
  const DeviceScope scope(api_, device_id_);
  // Without the list of process numbers: the peer is not known yet, in a container its number is
  // not the one the driver sees, and the key only travels over our own Unix socket.
  VMM_ACL(aclrtMemExportToShareableHandle, pointer(handle), abi::kHandleNone,
          abi::kExportDisablePidValidation, &exported.key);
  exported_keys_[handle.value] = exported.key;
  return exported;
}

Handle AclBackend::import_handle(const Exported& exported) {
  const std::lock_guard<std::shared_mutex> lock(mutex_);
  table_.check_create(exported.num_bytes);
  const DeviceScope scope(api_, device_id_);
  abi::DrvMemHandle imported = nullptr;
  VMM_ACL(aclrtMemImportFromShareableHandle, exported.key, device_id_, &imported);
  table_.record_create(handle_of(imported), exported.num_bytes);
  return handle_of(imported);
}

void AclBackend::copy(Address destination, Address source, std::size_t num_bytes) {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  table_.check_copy(destination, source, num_bytes);
  const DeviceScope scope(api_, device_id_);
  VMM_ACL(aclrtMemcpy, pointer(destination), num_bytes, pointer(source), num_bytes,
          abi::kMemcpyDeviceToDevice);
}

void AclBackend::read(void* host, Address source, std::size_t num_bytes) {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  table_.check_covered(source, num_bytes);
  const DeviceScope scope(api_, device_id_);
  VMM_ACL(aclrtMemcpy, host, num_bytes, pointer(source), num_bytes, abi::kMemcpyDeviceToHost);
}

void AclBackend::write(Address destination, const void* host, std::size_t num_bytes) {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  table_.check_covered(destination, num_bytes);
  const DeviceScope scope(api_, device_id_);
  VMM_ACL(aclrtMemcpy, pointer(destination), num_bytes, host, num_bytes,
          abi::kMemcpyHostToDevice);
}

#undef VMM_ACL

}  // namespace

BackendPtr open_acl(const BackendOptions& options) {
  return std::make_shared<AclBackend>(options);
}

}  // namespace sgl_vmm
