// The CUDA backend: the driver API's virtual memory management, opened by dlopen.
//
//   backend.h --> [cuda.cpp] --> cuda_abi.h --> libcuda.so.1
//
//   reserve      cuMemAddressReserve     |  release   cuMemAddressFree
//   create       cuMemCreate (pinned)    |  destroy   cuMemRelease
//   map          cuMemMap                |  unmap     cuMemUnmap
//   set_access   cuMemSetAccess          |  export, import: a POSIX file descriptor
//
//   copy         cuMemcpyDtoD_v2         |  peek, poke   cuMemcpyDtoH_v2, cuMemcpyHtoD_v2
//
// All but the copies name their device and take no context, so any thread may call them. A copy
// runs in the device's primary context, the one that torch uses too, and on its default stream: not
// while this process captures a graph. Addresses are unified, so a page of another device, mapped
// here with access, is copied from peer to peer.
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "vmm/backend.h"
#include "vmm/cuda_abi.h"
#include "vmm/dynamic_library.h"
#include "vmm/mapping_table.h"

namespace sgl_vmm {
namespace {

namespace abi = cuda_abi;

struct CudaApi {
  explicit CudaApi(const DynamicLibrary& library);

  abi::cuInit* cuInit;
  abi::cuGetErrorName* cuGetErrorName;
  abi::cuDeviceGet* cuDeviceGet;
  abi::cuDeviceGetAttribute* cuDeviceGetAttribute;
  abi::cuMemGetAllocationGranularity* cuMemGetAllocationGranularity;
  abi::cuMemAddressReserve* cuMemAddressReserve;
  abi::cuMemAddressFree* cuMemAddressFree;
  abi::cuMemCreate* cuMemCreate;
  abi::cuMemRelease* cuMemRelease;
  abi::cuMemMap* cuMemMap;
  abi::cuMemUnmap* cuMemUnmap;
  abi::cuMemSetAccess* cuMemSetAccess;
  abi::cuMemExportToShareableHandle* cuMemExportToShareableHandle;
  abi::cuMemImportFromShareableHandle* cuMemImportFromShareableHandle;
  abi::cuDevicePrimaryCtxRetain* cuDevicePrimaryCtxRetain;
  abi::cuDevicePrimaryCtxRelease_v2* cuDevicePrimaryCtxRelease_v2;
  abi::cuCtxPushCurrent_v2* cuCtxPushCurrent_v2;
  abi::cuCtxPopCurrent_v2* cuCtxPopCurrent_v2;
  abi::cuStreamSynchronize* cuStreamSynchronize;
  abi::cuMemcpyDtoD_v2* cuMemcpyDtoD_v2;
  abi::cuMemcpyDtoH_v2* cuMemcpyDtoH_v2;
  abi::cuMemcpyHtoD_v2* cuMemcpyHtoD_v2;
};

#define LOAD(function) function(library.symbol<abi::function>(#function))

CudaApi::CudaApi(const DynamicLibrary& library)
    : LOAD(cuInit),
      LOAD(cuGetErrorName),
      LOAD(cuDeviceGet),
      LOAD(cuDeviceGetAttribute),
      LOAD(cuMemGetAllocationGranularity),
      LOAD(cuMemAddressReserve),
      LOAD(cuMemAddressFree),
      LOAD(cuMemCreate),
      LOAD(cuMemRelease),
      LOAD(cuMemMap),
      LOAD(cuMemUnmap),
      LOAD(cuMemSetAccess),
      LOAD(cuMemExportToShareableHandle),
      LOAD(cuMemImportFromShareableHandle),
      LOAD(cuDevicePrimaryCtxRetain),
      LOAD(cuDevicePrimaryCtxRelease_v2),
      LOAD(cuCtxPushCurrent_v2),
      LOAD(cuCtxPopCurrent_v2),
      LOAD(cuStreamSynchronize),
      LOAD(cuMemcpyDtoD_v2),
      LOAD(cuMemcpyDtoH_v2),
      LOAD(cuMemcpyHtoD_v2) {}

#undef LOAD

ErrorKind kind_of(abi::Result result) {
  switch (result) {
    case abi::kErrorOutOfMemory:
      return ErrorKind::kExhausted;
    case abi::kErrorInvalidDevice:
      return ErrorKind::kInvalidArgument;
    case abi::kErrorNoDevice:
    case abi::kErrorStubLibrary:
    case abi::kErrorNotSupported:
      return ErrorKind::kUnsupported;
    default:
      return ErrorKind::kVendorCall;
  }
}

// Calls one function of the vendor and throws, with its name and this line, if it fails.
#define VMM_CUDA(function, ...) check(api_.function(__VA_ARGS__), #function, __FILE__, __LINE__)

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(const BackendOptions& options)
      : api_(DynamicLibrary(options.library.empty() ? "libcuda.so.1" : options.library,
                            "install the NVIDIA driver, or choose the host backend")),
        device_id_(options.device_id),
        device_(open_device()),
        can_export_(read_can_export()),
        prop_(make_prop()),
        granularity_(read_granularity()),
        table_(name(), granularity_) {}

  ~CudaBackend() override;

  const char* name() const override { return "cuda"; }
  DeviceType device_type() const override { return DeviceType::kCuda; }
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
  // The device's primary context, current on this thread while it lives.
  class ContextScope {
   public:
    explicit ContextScope(CudaBackend& backend) : backend_(backend) {
      const abi::Context context = backend_.context();
      backend_.check(backend_.api_.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent_v2", __FILE__,
                     __LINE__);
    }
    ~ContextScope() {
      abi::Context popped = nullptr;
      backend_.api_.cuCtxPopCurrent_v2(&popped);
    }
    ContextScope(const ContextScope&) = delete;
    ContextScope& operator=(const ContextScope&) = delete;

   private:
    CudaBackend& backend_;
  };

  abi::Context context();
  abi::Device open_device() const;
  bool read_can_export() const;
  abi::MemLocation location() const { return {abi::kLocationDevice, device_id_}; }
  abi::MemAllocationProp make_prop() const;
  std::size_t read_granularity() const;
  void check(abi::Result result, const char* call, const char* file, int line) const;

  const CudaApi api_;
  const int device_id_;
  const abi::Device device_;
  const bool can_export_;
  const abi::MemAllocationProp prop_;
  const std::size_t granularity_;

  // Held from each check of the table, over the vendor's call, to its record; shared by copies.
  std::shared_mutex mutex_;
  MappingTable table_;

  std::mutex context_mutex_;
  abi::Context context_ = nullptr;  // until the first copy: it costs memory of the device
};

CudaBackend::~CudaBackend() {
  for (const auto& [address, mapping] : table_.mappings()) {
    api_.cuMemUnmap(address, mapping.num_bytes);
  }
  for (const auto& [handle, memory] : table_.memories()) {
    for (std::size_t i = 0; i < memory.num_owners; ++i) api_.cuMemRelease(handle);
  }
  for (const auto& [address, num_bytes] : table_.reservations()) {
    api_.cuMemAddressFree(address, num_bytes);
  }
  if (context_) api_.cuDevicePrimaryCtxRelease_v2(device_);
}

void CudaBackend::check(abi::Result result, const char* call, const char* file, int line) const {
  if (result == abi::kSuccess) return;
  const char* code_name = nullptr;
  if (api_.cuGetErrorName(result, &code_name) != abi::kSuccess || !code_name) {
    code_name = "a code without a name";
  }
  throw VmmError(kind_of(result), name(), call, result, code_name, file, line);
}

abi::Device CudaBackend::open_device() const {
  VMM_CUDA(cuInit, 0);
  abi::Device device = 0;
  VMM_CUDA(cuDeviceGet, &device, device_id_);
  int has_vmm = 0;
  VMM_CUDA(cuDeviceGetAttribute, &has_vmm, abi::kVirtualMemoryManagementSupported, device);
  if (!has_vmm) {
    throw VmmError(ErrorKind::kUnsupported,
                   "cuda: device " + std::to_string(device_id_) +
                       " has no virtual memory management; use padded expert memory");
  }
  return device;
}

bool CudaBackend::read_can_export() const {
  int has_fds = 0;
  VMM_CUDA(cuDeviceGetAttribute, &has_fds, abi::kPosixFileDescriptorSupported, device_);
  return has_fds != 0;
}

abi::MemAllocationProp CudaBackend::make_prop() const {
  abi::MemAllocationProp prop{};
  prop.type = abi::kAllocationPinned;
  prop.requested_handle_types = can_export_ ? abi::kHandlePosixFileDescriptor : abi::kHandleNone;
  prop.location = location();
  return prop;
}

std::size_t CudaBackend::read_granularity() const {
  std::size_t granularity = 0;
  VMM_CUDA(cuMemGetAllocationGranularity, &granularity, &prop_, abi::kGranularityMinimum);
  return granularity;
}

Address CudaBackend::reserve(std::size_t num_bytes, std::size_t alignment) {
  const std::lock_guard<std::shared_mutex> lock(mutex_);
  table_.check_reserve(num_bytes, alignment);
  abi::DevicePtr address = 0;
  VMM_CUDA(cuMemAddressReserve, &address, num_bytes, std::max(alignment, granularity_), 0, 0);
  table_.record_reserve(address, num_bytes);
  return address;
}

void CudaBackend::release(Address address, std::size_t num_bytes) {
  const std::lock_guard<std::shared_mutex> lock(mutex_);
  table_.check_release(address, num_bytes);
  VMM_CUDA(cuMemAddressFree, address, num_bytes);
  table_.record_release(address);
}

Handle CudaBackend::create(std::size_t num_bytes) {
  const std::lock_guard<std::shared_mutex> lock(mutex_);
  table_.check_create(num_bytes);
  abi::MemHandle handle = 0;
  VMM_CUDA(cuMemCreate, &handle, num_bytes, &prop_, 0);
  table_.record_create(Handle{handle}, num_bytes);
  return Handle{handle};
}

void CudaBackend::destroy(Handle handle) {
  const std::lock_guard<std::shared_mutex> lock(mutex_);
  table_.check_destroy(handle);
  VMM_CUDA(cuMemRelease, handle.value);
  table_.record_destroy(handle);
}

void CudaBackend::map(Address address, std::size_t num_bytes, Handle handle) {
  const std::lock_guard<std::shared_mutex> lock(mutex_);
  table_.check_map(address, num_bytes, handle);
  VMM_CUDA(cuMemMap, address, num_bytes, 0, handle.value, 0);
  table_.record_map(address, num_bytes, handle);
}

void CudaBackend::unmap(Address address, std::size_t num_bytes) {
  const std::lock_guard<std::shared_mutex> lock(mutex_);
  table_.check_unmap(address, num_bytes);
  VMM_CUDA(cuMemUnmap, address, num_bytes);
  table_.record_unmap(address);
}

void CudaBackend::set_access(Address address, std::size_t num_bytes) {
  const std::lock_guard<std::shared_mutex> lock(mutex_);
  table_.check_mapped(address, num_bytes);
  const abi::MemAccessDesc desc{location(), abi::kAccessReadWrite};
  VMM_CUDA(cuMemSetAccess, address, num_bytes, &desc, 1);
  table_.record_access(address, num_bytes);
}

Exported CudaBackend::export_handle(Handle handle) {
  const std::lock_guard<std::shared_mutex> lock(mutex_);
  Exported exported;
  exported.num_bytes = table_.check_handle(handle);
  if (!can_export_) {
    throw VmmError(ErrorKind::kUnsupported, "cuda: device " + std::to_string(device_id_) +
                                                " cannot export memory to a file descriptor");
  }
  VMM_CUDA(cuMemExportToShareableHandle, &exported.fd, handle.value,
           abi::kHandlePosixFileDescriptor, 0);
  return exported;
}

Handle CudaBackend::import_handle(const Exported& exported) {
  const std::lock_guard<std::shared_mutex> lock(mutex_);
  table_.check_create(exported.num_bytes);
  abi::MemHandle handle = 0;
  // The vendor takes the descriptor itself where a pointer is declared.
  VMM_CUDA(cuMemImportFromShareableHandle, &handle,
           reinterpret_cast<void*>(static_cast<std::intptr_t>(exported.fd)),
           abi::kHandlePosixFileDescriptor);
  table_.record_create(Handle{handle}, exported.num_bytes);
  close(exported.fd);
  return Handle{handle};
}

abi::Context CudaBackend::context() {
  const std::lock_guard<std::mutex> lock(context_mutex_);
  if (!context_) VMM_CUDA(cuDevicePrimaryCtxRetain, &context_, device_);
  return context_;
}

// cuMemcpyDtoD_v2 may return before the device is done.
void CudaBackend::copy(Address destination, Address source, std::size_t num_bytes) {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  table_.check_copy(destination, source, num_bytes);
  const ContextScope scope(*this);
  VMM_CUDA(cuMemcpyDtoD_v2, destination, source, num_bytes);
  VMM_CUDA(cuStreamSynchronize, abi::kDefaultStream);
}

void CudaBackend::read(void* host, Address source, std::size_t num_bytes) {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  table_.check_covered(source, num_bytes);
  const ContextScope scope(*this);
  VMM_CUDA(cuMemcpyDtoH_v2, host, source, num_bytes);
}

// From pageable memory the vendor may return before the device has the bytes.
void CudaBackend::write(Address destination, const void* host, std::size_t num_bytes) {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  table_.check_covered(destination, num_bytes);
  const ContextScope scope(*this);
  VMM_CUDA(cuMemcpyHtoD_v2, destination, host, num_bytes);
  VMM_CUDA(cuStreamSynchronize, abi::kDefaultStream);
}

#undef VMM_CUDA

}  // namespace

BackendPtr open_cuda(const BackendOptions& options) {
  return std::make_shared<CudaBackend>(options);
}

}  // namespace sgl_vmm
