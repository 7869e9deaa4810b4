// Compiled, never run: vmm/cuda_abi.h against the vendor's cuda.h. It compiles or it names what
// differs. Off unless -DCUDA_INCLUDE_DIR is given.
#include <cuda.h>

#include "checks/abi.h"
#include "vmm/cuda_abi.h"

namespace ours = sgl_vmm::cuda_abi;

// Through a string, so that a name that cuda.h defines as a macro for a _v2 symbol is seen.
#define LINKER_NAME_OF(name) #name
#define LINKER_NAME(name) LINKER_NAME_OF(name)
constexpr bool same_text(const char* left, const char* right) {
  while (*left && *left == *right) {
    ++left;
    ++right;
  }
  return *left == *right;
}

#define SAME_FUNCTION(name)                                                             \
  static_assert(same_text(LINKER_NAME(name), #name), #name " is a macro in cuda.h");    \
  static_assert(sgl_vmm::abi_check::kSameAbi<decltype(::name), ours::name>, #name)

SAME_FUNCTION(cuInit);
SAME_FUNCTION(cuGetErrorName);
SAME_FUNCTION(cuDeviceGet);
SAME_FUNCTION(cuDeviceGetAttribute);
SAME_FUNCTION(cuMemGetAllocationGranularity);
SAME_FUNCTION(cuMemAddressReserve);
SAME_FUNCTION(cuMemAddressFree);
SAME_FUNCTION(cuMemCreate);
SAME_FUNCTION(cuMemRelease);
SAME_FUNCTION(cuMemMap);
SAME_FUNCTION(cuMemUnmap);
SAME_FUNCTION(cuMemSetAccess);
SAME_FUNCTION(cuMemExportToShareableHandle);
SAME_FUNCTION(cuMemImportFromShareableHandle);
SAME_FUNCTION(cuDevicePrimaryCtxRetain);
SAME_FUNCTION(cuDevicePrimaryCtxRelease_v2);
SAME_FUNCTION(cuCtxPushCurrent_v2);
SAME_FUNCTION(cuCtxPopCurrent_v2);
SAME_FUNCTION(cuStreamSynchronize);
SAME_FUNCTION(cuMemcpyDtoD_v2);
SAME_FUNCTION(cuMemcpyDtoH_v2);
SAME_FUNCTION(cuMemcpyHtoD_v2);

SAME_STRUCT(CUmemLocation, ours::MemLocation);
SAME_MEMBER(CUmemLocation, type, ours::MemLocation, type);
SAME_MEMBER(CUmemLocation, id, ours::MemLocation, id);

SAME_STRUCT(CUmemAllocationProp, ours::MemAllocationProp);
SAME_MEMBER(CUmemAllocationProp, type, ours::MemAllocationProp, type);
SAME_MEMBER(CUmemAllocationProp, requestedHandleTypes, ours::MemAllocationProp,
            requested_handle_types);
SAME_MEMBER(CUmemAllocationProp, location, ours::MemAllocationProp, location);
SAME_MEMBER(CUmemAllocationProp, win32HandleMetaData, ours::MemAllocationProp,
            win32_handle_meta_data);
SAME_MEMBER(CUmemAllocationProp, allocFlags, ours::MemAllocationProp, alloc_flags);

using TheirFlags = decltype(CUmemAllocationProp::allocFlags);
SAME_MEMBER(TheirFlags, compressionType, ours::AllocationFlags, compression_type);
SAME_MEMBER(TheirFlags, gpuDirectRDMACapable, ours::AllocationFlags, gpu_direct_rdma_capable);
SAME_MEMBER(TheirFlags, usage, ours::AllocationFlags, usage);

SAME_STRUCT(CUmemAccessDesc, ours::MemAccessDesc);
SAME_MEMBER(CUmemAccessDesc, location, ours::MemAccessDesc, location);
SAME_MEMBER(CUmemAccessDesc, flags, ours::MemAccessDesc, flags);

SAME_VALUE(CUDA_SUCCESS, ours::kSuccess);
SAME_VALUE(CUDA_ERROR_INVALID_VALUE, ours::kErrorInvalidValue);
SAME_VALUE(CUDA_ERROR_OUT_OF_MEMORY, ours::kErrorOutOfMemory);
SAME_VALUE(CUDA_ERROR_NOT_INITIALIZED, ours::kErrorNotInitialized);
SAME_VALUE(CUDA_ERROR_STUB_LIBRARY, ours::kErrorStubLibrary);
SAME_VALUE(CUDA_ERROR_NO_DEVICE, ours::kErrorNoDevice);
SAME_VALUE(CUDA_ERROR_INVALID_DEVICE, ours::kErrorInvalidDevice);
SAME_VALUE(CUDA_ERROR_INVALID_CONTEXT, ours::kErrorInvalidContext);
SAME_VALUE(CUDA_ERROR_NOT_PERMITTED, ours::kErrorNotPermitted);
SAME_VALUE(CUDA_ERROR_NOT_SUPPORTED, ours::kErrorNotSupported);

SAME_VALUE(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
           ours::kVirtualMemoryManagementSupported);
SAME_VALUE(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
           ours::kPosixFileDescriptorSupported);
SAME_VALUE(CU_MEM_LOCATION_TYPE_DEVICE, ours::kLocationDevice);
SAME_VALUE(CU_MEM_ALLOCATION_TYPE_PINNED, ours::kAllocationPinned);
SAME_VALUE(CU_MEM_HANDLE_TYPE_NONE, ours::kHandleNone);
SAME_VALUE(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, ours::kHandlePosixFileDescriptor);
SAME_VALUE(CU_MEM_ACCESS_FLAGS_PROT_NONE, ours::kAccessNone);
SAME_VALUE(CU_MEM_ACCESS_FLAGS_PROT_READ, ours::kAccessRead);
SAME_VALUE(CU_MEM_ACCESS_FLAGS_PROT_READWRITE, ours::kAccessReadWrite);
SAME_VALUE(CU_MEM_ALLOC_GRANULARITY_MINIMUM, ours::kGranularityMinimum);
SAME_VALUE(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED, ours::kGranularityRecommended);
