// What the host backend asks of Linux: address space, and one sealed memfd as physical memory.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string>

#include "vmm/backend.h"

#define VMM_HOST_FAILED(call, kind) \
  throw VmmError(kind, "host", call, errno, strerrorname_np(errno), __FILE__, __LINE__)

namespace sgl_vmm::host_os {

inline std::uint8_t* pointer(Address address) { return reinterpret_cast<std::uint8_t*>(address); }
inline Address address_of(void* memory) { return reinterpret_cast<Address>(memory); }

[[noreturn]] inline void refuse(ErrorKind kind, const std::string& message) {
  throw VmmError(kind, "host: " + message);
}

inline ErrorKind kind_of_errno() {
  return errno == ENOMEM || errno == ENOSPC ? ErrorKind::kExhausted : ErrorKind::kVendorCall;
}

// Inaccessible address space. `at` = 0 lets the kernel choose, otherwise it replaces what is there.
inline Address reserve_range(std::size_t num_bytes, Address at) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED : 0);
  void* memory = mmap(pointer(at), num_bytes, PROT_NONE, flags, -1, 0);
  if (memory == MAP_FAILED) VMM_HOST_FAILED("mmap(PROT_NONE)", kind_of_errno());
  return address_of(memory);
}

inline Address reserve_aligned(std::size_t num_bytes, std::size_t alignment) {
  const Address raw = reserve_range(num_bytes + alignment, 0);
  const Address aligned = (raw + alignment - 1) / alignment * alignment;
  if (aligned > raw) munmap(pointer(raw), aligned - raw);
  const Address end = aligned + num_bytes;
  if (raw + num_bytes + alignment > end) munmap(pointer(end), raw + alignment - aligned);
  return aligned;
}

inline std::size_t memory_of_machine() {
  return static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

using FilePtr = std::shared_ptr<FileDescriptor>;

inline FilePtr make_arena_file(std::size_t num_bytes) {
  auto file = std::make_shared<FileDescriptor>(
      memfd_create("sgl_vmm", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file->get() < 0) VMM_HOST_FAILED("memfd_create", ErrorKind::kVendorCall);
  if (ftruncate(file->get(), static_cast<off_t>(num_bytes)) != 0) {
    VMM_HOST_FAILED("ftruncate", kind_of_errno());
  }
  if (fcntl(file->get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    VMM_HOST_FAILED("fcntl(F_ADD_SEALS)", ErrorKind::kVendorCall);
  }
  return file;
}

}  // namespace sgl_vmm::host_os
