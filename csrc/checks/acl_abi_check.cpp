// Compiled, never run: vmm/acl_abi.h against the vendor's acl/acl_rt.h. It compiles or it names
// what differs. Off unless -DACL_INCLUDE_DIR is given.
#include <acl/acl_rt.h>
#include <acl/error_codes/rt_error_codes.h>

#include "checks/abi.h"
#include "vmm/acl_abi.h"

namespace ours = sgl_vmm::acl_abi;

#define SAME_FUNCTION(name) \
  static_assert(sgl_vmm::abi_check::kSameAbi<decltype(::name), ours::name>, #name)

SAME_FUNCTION(aclInit);
SAME_FUNCTION(aclrtSetDevice);
SAME_FUNCTION(aclrtGetDevice);
SAME_FUNCTION(aclrtMemGetAllocationGranularity);
SAME_FUNCTION(aclrtReserveMemAddress);
SAME_FUNCTION(aclrtReleaseMemAddress);
SAME_FUNCTION(aclrtMallocPhysical);
SAME_FUNCTION(aclrtFreePhysical);
SAME_FUNCTION(aclrtMapMem);
SAME_FUNCTION(aclrtUnmapMem);
SAME_FUNCTION(aclrtMemExportToShareableHandle);
SAME_FUNCTION(aclrtMemImportFromShareableHandle);
SAME_FUNCTION(aclrtMemcpy);
SAME_FUNCTION(aclrtMemSetPidToShareableHandle);

SAME_STRUCT(aclrtMemLocation, ours::MemLocation);
SAME_MEMBER(aclrtMemLocation, id, ours::MemLocation, id);
SAME_MEMBER(aclrtMemLocation, type, ours::MemLocation, type);

SAME_STRUCT(aclrtPhysicalMemProp, ours::PhysicalMemProp);
SAME_MEMBER(aclrtPhysicalMemProp, handleType, ours::PhysicalMemProp, handle_type);
SAME_MEMBER(aclrtPhysicalMemProp, allocationType, ours::PhysicalMemProp, allocation_type);
SAME_MEMBER(aclrtPhysicalMemProp, memAttr, ours::PhysicalMemProp, mem_attr);
SAME_MEMBER(aclrtPhysicalMemProp, location, ours::PhysicalMemProp, location);
SAME_MEMBER(aclrtPhysicalMemProp, reserve, ours::PhysicalMemProp, reserve);

SAME_VALUE(ACL_SUCCESS, ours::kSuccess);
SAME_VALUE(ACL_ERROR_INVALID_PARAM, ours::kErrorInvalidParam);
SAME_VALUE(ACL_ERROR_UNINITIALIZE, ours::kErrorUninitialize);
SAME_VALUE(ACL_ERROR_REPEAT_INITIALIZE, ours::kErrorRepeatInitialize);
SAME_VALUE(ACL_ERROR_RT_PARAM_INVALID, ours::kErrorRtParamInvalid);
SAME_VALUE(ACL_ERROR_RT_INVALID_DEVICEID, ours::kErrorRtInvalidDeviceId);
SAME_VALUE(ACL_ERROR_RT_CONTEXT_NULL, ours::kErrorRtContextNull);
SAME_VALUE(ACL_ERROR_RT_ADDR_UNALIGNED, ours::kErrorRtAddrUnaligned);
SAME_VALUE(ACL_ERROR_RT_INVALID_HANDLE, ours::kErrorRtInvalidHandle);
SAME_VALUE(ACL_ERROR_BAD_ALLOC, ours::kErrorBadAlloc);
SAME_VALUE(ACL_ERROR_API_NOT_SUPPORT, ours::kErrorApiNotSupport);
SAME_VALUE(ACL_ERROR_FEATURE_UNSUPPORTED, ours::kErrorFeatureUnsupported);
SAME_VALUE(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, ours::kErrorRtFeatureNotSupport);
SAME_VALUE(ACL_ERROR_RT_MEMORY_ALLOCATION, ours::kErrorRtMemoryAllocation);
SAME_VALUE(ACL_ERROR_RT_NO_DEVICE, ours::kErrorRtNoDevice);
SAME_VALUE(ACL_ERROR_RT_NO_PERMISSION, ours::kErrorRtNoPermission);
SAME_VALUE(ACL_ERROR_RT_DEVICE_OOM, ours::kErrorRtDeviceOom);
SAME_VALUE(ACL_ERROR_RT_INTERNAL_ERROR, ours::kErrorRtInternalError);

SAME_VALUE(ACL_MEM_HANDLE_TYPE_NONE, ours::kHandleNone);
SAME_VALUE(ACL_MEM_ALLOCATION_TYPE_PINNED, ours::kAllocationPinned);
SAME_VALUE(ACL_HBM_MEM_HUGE, ours::kHbmMemHuge);
SAME_VALUE(ACL_HBM_MEM_NORMAL, ours::kHbmMemNormal);
SAME_VALUE(ACL_MEM_LOCATION_TYPE_HOST, ours::kLocationHost);
SAME_VALUE(ACL_MEM_LOCATION_TYPE_DEVICE, ours::kLocationDevice);
SAME_VALUE(ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM, ours::kGranularityMinimum);
SAME_VALUE(ACL_RT_MEM_ALLOC_GRANULARITY_RECOMMENDED, ours::kGranularityRecommended);
SAME_VALUE(ACL_MEMCPY_HOST_TO_HOST, ours::kMemcpyHostToHost);
SAME_VALUE(ACL_MEMCPY_HOST_TO_DEVICE, ours::kMemcpyHostToDevice);
SAME_VALUE(ACL_MEMCPY_DEVICE_TO_HOST, ours::kMemcpyDeviceToHost);
SAME_VALUE(ACL_MEMCPY_DEVICE_TO_DEVICE, ours::kMemcpyDeviceToDevice);
SAME_VALUE(ACL_RT_VMM_EXPORT_FLAG_DEFAULT, ours::kExportDefault);
SAME_VALUE(ACL_RT_VMM_EXPORT_FLAG_DISABLE_PID_VALIDATION, ours::kExportDisablePidValidation);
