// What memory can do: the one interface over vendors' virtual memory calls.
//
//   page_pool, virtual_tensor --> [Backend] --> host.cpp | cuda.cpp | acl.cpp
//
// The words are the vendors': an address range is reserved; physical memory is created and known by
// a handle; map puts a handle's memory behind an address; set_access lets the device use it.
// A handle may be mapped at several addresses at once (aliasing), and its memory lives until it is
// destroyed. Order of a life: reserve, create, map, set_access | unmap, destroy, release.
//
//   copy, peek, poke  between mapped addresses; a page of another process or device counts too
//   host  memcpy                  acl  aclrtMemcpy
//   cuda  cuMemcpyDtoD_v2, DtoH, HtoD in the device's primary context, which the first one makes
// They wait for no kernel: whoever wrote the source has finished before. An unmap waits for them.
//
// A stray access, to an address that is reserved but not mapped, is never served:
//   host  SIGSEGV (the range is PROT_NONE)
//   cuda  the kernel fails with CUDA_ERROR_ILLEGAL_ADDRESS
//   acl   the operator fails with an address error (not yet seen on hardware)
//
// Every method throws VmmError and then has changed nothing. Methods may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"

namespace sgl_vmm {

using Address = std::uintptr_t;

constexpr std::size_t kMaxPeekBytes = std::size_t{16} << 20;

// The right to map one piece of physical memory. Its meaning is the backend's.
struct Handle {
  std::uint64_t value = 0;
  bool operator==(const Handle& other) const { return value == other.value; }
};

// A handle on its way to another process (share.h carries it).
struct Exported {
  int fd = -1;            // host, cuda: owned by whoever holds this; -1 for acl
  std::uint64_t key = 0;  // host: offset in bytes into fd; acl: the shareable handle
  std::size_t num_bytes = 0;
};

// DLPack's numbers, so that a tensor over mapped memory can say where it lies.
enum class DeviceType : std::int32_t { kCpu = 1, kCuda = 2, kNpu = 12 };

class Backend {
 public:
  virtual ~Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  virtual const char* name() const = 0;
  virtual DeviceType device_type() const = 0;
  virtual int device_id() const = 0;

  // Smallest unit of create and map, in bytes; a power of two, checked when a backend is opened.
  virtual std::size_t granularity() const = 0;

  // `alignment` is a power of two; a larger one than the granularity may be refused.
  virtual Address reserve(std::size_t num_bytes, std::size_t alignment) = 0;
  // The whole of one reservation. Refuses (kPageMapped) while something in it is mapped.
  virtual void release(Address address, std::size_t num_bytes) = 0;

  virtual Handle create(std::size_t num_bytes) = 0;
  // Appends `count` handles of `num_bytes` each. Where it throws, those that were made before the
  // failure are in `created`, and the caller's.
  virtual void create_run(std::size_t num_bytes, std::size_t count, std::vector<Handle>& created);
  // Refuses (kPageMapped) while the handle is mapped anywhere.
  virtual void destroy(Handle handle) = 0;

  // `num_bytes` is the handle's whole size; `address` is a multiple of the granularity.
  // Refuses (kInvalidArgument) a range that is not reserved or already mapped.
  virtual void map(Address address, std::size_t num_bytes, Handle handle) = 0;
  // Takes back exactly one earlier map; afterwards the range is reserved again.
  virtual void unmap(Address address, std::size_t num_bytes) = 0;
  // For a run of mapped handles at once: on a GPU it costs ten times a map.
  virtual void set_access(Address address, std::size_t num_bytes) = 0;

  // For another process: AscendCL refuses to import where it exported.
  virtual Exported export_handle(Handle handle) = 0;
  // Takes ownership of `exported.fd` when it returns.
  virtual Handle import_handle(const Exported& exported) = 0;

  // Bytes from one mapped range to another, done when it returns. Refuses (kInvalidArgument) ranges
  // that are empty, overlap, or are not wholly mapped here with access. Two addresses of the same
  // memory do not overlap by this rule, and then the content is undefined.
  virtual void copy(Address destination, Address source, std::size_t num_bytes) = 0;
  // To and from the caller's own memory, for digests and tests: at most kMaxPeekBytes a call.
  std::vector<std::uint8_t> peek(Address address, std::size_t num_bytes);
  void poke(Address address, std::string_view data);

  // Bytes of physical memory that the operating system says are behind this backend's own handles.
  virtual std::optional<std::size_t> resident_bytes() const { return std::nullopt; }

  // Maps `handles` one after the other from `address` on, each `page_bytes` long, then gives
  // access to the whole run. A failure unmaps what was mapped, and is the one that is thrown; a page
  // that then cannot be unmapped stays mapped, and `unmap` of it may be tried again.
  virtual void map_run(Address address, std::size_t page_bytes, const std::vector<Handle>& handles);

 protected:
  Backend() = default;
  // As copy refuses; `host` is any memory of this process.
  virtual void read(void* host, Address source, std::size_t num_bytes) = 0;
  virtual void write(Address destination, const void* host, std::size_t num_bytes) = 0;
};

struct BackendOptions {
  int device_id = 0;
  // host only: the size of a page, and of the arena all pages come from (sparse until touched).
  std::size_t page_bytes = std::size_t{2} << 20;
  std::size_t capacity_bytes = 0;  // 0 = as much as the machine has memory
  // host only: pages get their memory, zeroed, when they are created, and keep their page tables
  // when they are mapped. Otherwise each first touch of 4 KiB faults.
  bool populate = true;
  // cuda, acl: the vendor's library; empty = its usual name. Tests name a simulator here.
  std::string library;
};

using BackendPtr = std::shared_ptr<Backend>;

BackendPtr open_host(const BackendOptions& options);
BackendPtr open_cuda(const BackendOptions& options);
BackendPtr open_acl(const BackendOptions& options);

// `name` is "host", "cuda" or "acl". Throws kUnsupported for a device without virtual memory
// management or a library that is not there, kBadGranularity for one that is no power of two.
BackendPtr open_backend(const std::string& name, const BackendOptions& options);

// Whether [left, left + num_bytes) and [right, right + num_bytes) have a byte in common.
constexpr bool ranges_overlap(Address left, Address right, std::size_t num_bytes) {
  return left < right ? right - left < num_bytes : left - right < num_bytes;
}

constexpr bool is_power_of_two(std::size_t value) { return value && !(value & (value - 1)); }

}  // namespace sgl_vmm
