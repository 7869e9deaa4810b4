// The part of AscendCL that acl.cpp calls, in declarations of our own.
//
//   acl.cpp --> [acl_abi.h] <-- checks/acl_abi_check.cpp, against the vendor's acl/acl_rt.h
//
// The function types carry the names that the linker knows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sgl_vmm::acl_abi {

// Not an enumeration: the functions return plain numbers, and there are hundreds.
using Error = int;
inline constexpr Error kSuccess = 0;
inline constexpr Error kErrorInvalidParam = 100000;
inline constexpr Error kErrorUninitialize = 100001;
inline constexpr Error kErrorRepeatInitialize = 100002;
inline constexpr Error kErrorRtParamInvalid = 107000;
inline constexpr Error kErrorRtInvalidDeviceId = 107001;
inline constexpr Error kErrorRtContextNull = 107002;
inline constexpr Error kErrorRtAddrUnaligned = 107008;
inline constexpr Error kErrorRtInvalidHandle = 107017;
inline constexpr Error kErrorBadAlloc = 200000;
inline constexpr Error kErrorApiNotSupport = 200001;
inline constexpr Error kErrorFeatureUnsupported = 200006;
inline constexpr Error kErrorRtFeatureNotSupport = 207000;
inline constexpr Error kErrorRtMemoryAllocation = 207001;
inline constexpr Error kErrorRtNoDevice = 207004;
inline constexpr Error kErrorRtNoPermission = 207006;
inline constexpr Error kErrorRtDeviceOom = 207018;
inline constexpr Error kErrorRtInternalError = 507000;

using DrvMemHandle = void*;

enum MemHandleType : int { kHandleNone = 0 };
enum MemAllocationType : int { kAllocationPinned = 0 };
enum MemAttr : int { kHbmMemHuge = 4, kHbmMemNormal = 5 };
enum MemLocationType : int { kLocationHost = 0, kLocationDevice = 1 };
enum GranularityOption : int { kGranularityMinimum = 0, kGranularityRecommended = 1 };

enum MemcpyKind : int {
  kMemcpyHostToHost = 0,
  kMemcpyHostToDevice = 1,
  kMemcpyDeviceToHost = 2,
  kMemcpyDeviceToDevice = 3,
};

inline constexpr std::uint64_t kExportDefault = 0;
inline constexpr std::uint64_t kExportDisablePidValidation = 1;

struct MemLocation {
  std::uint32_t id;
  MemLocationType type;
};

struct PhysicalMemProp {
  MemHandleType handle_type;
  MemAllocationType allocation_type;
  MemAttr mem_attr;
  MemLocation location;
  std::uint64_t reserve;
};

using aclInit = Error(const char* config_path);
using aclrtSetDevice = Error(std::int32_t device_id);
using aclrtGetDevice = Error(std::int32_t* device_id);
using aclrtMemGetAllocationGranularity = Error(PhysicalMemProp* prop, GranularityOption option,
                                               std::size_t* granularity);
using aclrtReserveMemAddress = Error(void** address, std::size_t num_bytes, std::size_t alignment,
                                     void* expected, std::uint64_t flags);
using aclrtReleaseMemAddress = Error(void* address);
using aclrtMallocPhysical = Error(DrvMemHandle* handle, std::size_t num_bytes,
                                  const PhysicalMemProp* prop, std::uint64_t flags);
using aclrtFreePhysical = Error(DrvMemHandle handle);
using aclrtMapMem = Error(void* address, std::size_t num_bytes, std::size_t offset,
                          DrvMemHandle handle, std::uint64_t flags);
using aclrtUnmapMem = Error(void* address);
using aclrtMemExportToShareableHandle = Error(DrvMemHandle handle, MemHandleType type,
                                              std::uint64_t flags, std::uint64_t* shareable);
using aclrtMemImportFromShareableHandle = Error(std::uint64_t shareable, std::int32_t device_id,
                                                DrvMemHandle* handle);
using aclrtMemcpy = Error(void* destination, std::size_t destination_bytes, const void* source,
                          std::size_t num_bytes, MemcpyKind kind);
// Only the simulator's tests use it; acl.cpp says why.
using aclrtMemSetPidToShareableHandle = Error(std::uint64_t shareable, std::int32_t* pids,
                                              std::size_t num_pids);

}  // namespace sgl_vmm::acl_abi
