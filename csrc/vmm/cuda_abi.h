// The part of the CUDA driver API that cuda.cpp calls, in declarations of our own.
//
//   cuda.cpp --> [cuda_abi.h] <-- checks/cuda_abi_check.cpp, against the vendor's cuda.h
//
// The function types carry the names that the linker knows, _v2 where cuda.h means those.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sgl_vmm::cuda_abi {

enum Result : int {
  kSuccess = 0,
  kErrorInvalidValue = 1,
  kErrorOutOfMemory = 2,
  kErrorNotInitialized = 3,
  kErrorStubLibrary = 34,
  kErrorNoDevice = 100,
  kErrorInvalidDevice = 101,
  kErrorInvalidContext = 201,
  kErrorNotPermitted = 800,
  kErrorNotSupported = 801,
};

using Device = int;
using DevicePtr = unsigned long long;
using MemHandle = unsigned long long;
using Context = void*;
using Stream = void*;
inline constexpr Stream kDefaultStream = nullptr;

enum DeviceAttribute : int {
  kVirtualMemoryManagementSupported = 102,
  kPosixFileDescriptorSupported = 103,
};
enum LocationType : int { kLocationDevice = 1 };
enum AllocationType : int { kAllocationPinned = 1 };
enum HandleType : int { kHandleNone = 0, kHandlePosixFileDescriptor = 1 };
enum AccessFlags : int { kAccessNone = 0, kAccessRead = 1, kAccessReadWrite = 3 };
enum GranularityOption : int { kGranularityMinimum = 0, kGranularityRecommended = 1 };

struct MemLocation {
  LocationType type;
  int id;
};

struct AllocationFlags {
  std::uint8_t compression_type;
  std::uint8_t gpu_direct_rdma_capable;
  std::uint16_t usage;
  std::uint8_t reserved[4];
};

struct MemAllocationProp {
  AllocationType type;
  HandleType requested_handle_types;
  MemLocation location;
  void* win32_handle_meta_data;
  AllocationFlags alloc_flags;
};

struct MemAccessDesc {
  MemLocation location;
  AccessFlags flags;
};

using cuInit = Result(unsigned int flags);
using cuGetErrorName = Result(Result error, const char** name);
using cuDeviceGet = Result(Device* device, int ordinal);
using cuDeviceGetAttribute = Result(int* value, DeviceAttribute attribute, Device device);
using cuMemGetAllocationGranularity = Result(std::size_t* granularity,
                                             const MemAllocationProp* prop,
                                             GranularityOption option);
using cuMemAddressReserve = Result(DevicePtr* address, std::size_t num_bytes,
                                   std::size_t alignment, DevicePtr hint,
                                   unsigned long long flags);
using cuMemAddressFree = Result(DevicePtr address, std::size_t num_bytes);
using cuMemCreate = Result(MemHandle* handle, std::size_t num_bytes,
                           const MemAllocationProp* prop, unsigned long long flags);
using cuMemRelease = Result(MemHandle handle);
using cuMemMap = Result(DevicePtr address, std::size_t num_bytes, std::size_t offset,
                        MemHandle handle, unsigned long long flags);
using cuMemUnmap = Result(DevicePtr address, std::size_t num_bytes);
using cuMemSetAccess = Result(DevicePtr address, std::size_t num_bytes, const MemAccessDesc* descs,
                              std::size_t num_descs);
using cuMemExportToShareableHandle = Result(void* shareable, MemHandle handle, HandleType type,
                                            unsigned long long flags);
using cuMemImportFromShareableHandle = Result(MemHandle* handle, void* shareable, HandleType type);
using cuDevicePrimaryCtxRetain = Result(Context* context, Device device);
using cuDevicePrimaryCtxRelease_v2 = Result(Device device);
using cuCtxPushCurrent_v2 = Result(Context context);
using cuCtxPopCurrent_v2 = Result(Context* context);
using cuStreamSynchronize = Result(Stream stream);
using cuMemcpyDtoD_v2 = Result(DevicePtr destination, DevicePtr source, std::size_t num_bytes);
using cuMemcpyDtoH_v2 = Result(void* destination, DevicePtr source, std::size_t num_bytes);
using cuMemcpyHtoD_v2 = Result(DevicePtr destination, const void* source, std::size_t num_bytes);

}  // namespace sgl_vmm::cuda_abi
