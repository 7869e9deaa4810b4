// What the two contract simulators share: memory, addresses, faults to order, and counters.
//
//   C++ and Python tests --> backend --dlopen--> cuda_simulator.cpp | acl_simulator.cpp
//         |                                                |
//         +-- sim_* controls (dlsym, ctypes) ------> [simulator.h]
//
// TEST ONLY. These libraries have the vendors' C symbols and check the vendors' documented contract
// over memfd and mmap, so that a backend truly maps, aliases and shares on a machine without the
// device. They cannot show what the documents leave out, what a driver costs, how a device accesses
// memory, nor that a call is safe beside running kernels. README.md lists the rules.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#define SIM_EXPORT extern "C" __attribute__((visibility("default")))

namespace simulator {

constexpr std::size_t kHostPageBytes = 4096;
constexpr int kNumDevices = 4;

// One allocation of device memory: a memfd, with a page behind the memory that says what it is, so
// that another process can import it from the descriptor alone. Freed with its last handle and
// last mapping in this process, and by the kernel with the last process.
class Memory {
 public:
  static std::shared_ptr<Memory> create(std::size_t num_bytes, int device_id);
  // Null if `fd` is no simulator's memory. Does not take `fd`.
  static std::shared_ptr<Memory> import(int fd);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  int duplicate_fd() const;

  // Who may import, for acl: kept in the memory itself, where the importer looks.
  void allow_everyone();
  bool allow(const std::vector<std::int32_t>& pids);
  bool allows(pid_t pid) const;

  const int fd;
  const std::size_t num_bytes;
  const int device_id;
  const bool is_imported;

 private:
  Memory(int fd, std::size_t num_bytes, int device_id, bool is_imported);
};

struct Mapping {
  std::size_t num_bytes = 0;
  std::shared_ptr<Memory> memory;
  std::array<int, kNumDevices> access = {};  // PROT_* of each device; the CPU has all of them
};

struct Reservation {
  std::size_t num_bytes = 0;
  std::uint64_t flags = 0;
};

using Address = std::uintptr_t;

// Real addresses of this process: PROT_NONE until mapped, and after.
class AddressSpace {
 public:
  // 0 if there is no room.
  Address reserve(std::size_t num_bytes, std::size_t alignment, std::uint64_t flags);
  bool release(Address address);
  // The reservation that holds the whole range, or null.
  const std::pair<const Address, Reservation>* reservation_of(Address address,
                                                              std::size_t num_bytes) const;
  bool has_mapping(Address address, std::size_t num_bytes) const;
  // The range is one or more whole mappings, without a gap.
  bool is_whole_run(Address address, std::size_t num_bytes) const;
  // `access` is every device's.
  bool map(Address address, std::size_t num_bytes, std::shared_ptr<Memory> memory, int access);
  void unmap(Address address, std::size_t num_bytes);
  // Of whole mappings.
  bool set_access(Address address, std::size_t num_bytes, int device_id, int access);
  // Every byte is mapped, and this device may do that with it.
  bool may_access(Address address, std::size_t num_bytes, int device_id, int access) const;
  void clear();

  const std::map<Address, Reservation>& reservations() const { return reservations_; }
  const std::map<Address, Mapping>& mappings() const { return mappings_; }

 private:
  std::map<Address, Reservation> reservations_;
  std::map<Address, Mapping> mappings_;
};

// A copy that the device has been told of and has not made yet, for cuda.
struct PendingCopy {
  Address destination = 0;
  Address source = 0;  // 0 = `data`
  std::size_t num_bytes = 0;
  std::vector<std::uint8_t> data;
};

struct Fault {
  std::string call;
  int calls_left;
  int code;
};

struct State {
  std::mutex mutex;

  std::size_t granularity = std::size_t{2} << 20;
  bool has_vmm = true;
  bool has_fd_export = true;
  std::size_t total_bytes = 0;  // 0 = without a limit
  std::size_t used_bytes = 0;   // of memory that was created here
  int num_deferred_releases = 0;

  bool is_initialized = false;
  int generation = 0;  // of sim_reset: a thread's device is forgotten with it
  AddressSpace space;
  std::map<std::uint64_t, std::shared_ptr<Memory>> handles;
  std::uint64_t next_handle = 0x1000;
  std::map<std::uint64_t, std::uint64_t> exported_keys;  // handle -> key, for acl
  std::map<std::uint64_t, std::uint64_t> imported_keys;  // handle -> key, for acl

  std::array<int, kNumDevices> num_context_owners = {};  // of primary contexts, for cuda
  std::vector<PendingCopy> pending_copies;

  std::vector<Fault> faults;
  std::map<std::string, int> counts;

  std::uint64_t add_handle(std::shared_ptr<Memory> memory);
  std::shared_ptr<Memory> memory_of(std::uint64_t handle) const;
  bool has_room(std::size_t num_bytes) const;
  bool is_mapped(const Memory& memory) const;
  // False for an unknown handle. Memory that is still mapped is freed with its last mapping.
  bool drop_handle(std::uint64_t handle);
  bool is_granular(std::uint64_t value) const { return value % granularity == 0; }
};

State& state();

// One vendor call: holds the lock, counts it, and knows whether a test ordered it to fail.
class Call {
 public:
  explicit Call(const char* name);
  const std::optional<int>& fault() const { return fault_; }

 private:
  std::lock_guard<std::mutex> lock_;
  std::optional<int> fault_;
};

}  // namespace simulator
