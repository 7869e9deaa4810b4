// What a vendor's driver holds for us: reservations, handles, and which handle lies where.
//
//   cuda.cpp, acl.cpp --> [MappingTable] decides, then the vendor's call, then record_*
//
// The vendors answer a wrong address with one code for everything, or not at all, so every refusal
// of backend.h is decided here, before the driver is asked. A check_* throws and changes nothing; a
// record_* follows a vendor call that succeeded, so a failed call leaves the table as it was.
//
// Not thread-safe: its backend holds one mutex from the check to the record; copies share it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>

#include "vmm/backend.h"

namespace sgl_vmm {

class MappingTable {
 public:
  struct Mapping {
    std::size_t num_bytes;
    Handle handle;
    bool has_access;
  };
  struct Memory {
    std::size_t num_bytes;
    std::size_t num_mappings;
    std::size_t num_owners;  // a driver may answer an import with a handle that is already known
  };

  MappingTable(std::string backend, std::size_t granularity)
      : backend_(std::move(backend)), granularity_(granularity) {}

  void check_reserve(std::size_t num_bytes, std::size_t alignment) const;
  void record_reserve(Address address, std::size_t num_bytes);
  void check_release(Address address, std::size_t num_bytes) const;
  void record_release(Address address);

  void check_create(std::size_t num_bytes) const;
  void record_create(Handle handle, std::size_t num_bytes);
  std::size_t check_handle(Handle handle) const;  // its size
  void check_destroy(Handle handle) const;
  void record_destroy(Handle handle);

  void check_map(Address address, std::size_t num_bytes, Handle handle) const;
  void record_map(Address address, std::size_t num_bytes, Handle handle);
  void check_unmap(Address address, std::size_t num_bytes) const;
  void record_unmap(Address address);
  // The range is one or more whole mappings, without a gap.
  void check_mapped(Address address, std::size_t num_bytes) const;

  void record_access(Address address, std::size_t num_bytes);
  // Every byte lies in some mapping with access: a device that reads another one does not recover.
  // The range may start and end inside one.
  void check_covered(Address address, std::size_t num_bytes) const;
  void check_copy(Address destination, Address source, std::size_t num_bytes) const;

  // Everything still held, for a backend that is closed.
  const std::map<Address, std::size_t>& reservations() const { return reservations_; }
  const std::map<Address, Mapping>& mappings() const { return mappings_; }
  const std::unordered_map<std::uint64_t, Memory>& memories() const { return memories_; }

 private:
  [[noreturn]] void refuse(ErrorKind kind, const std::string& what) const;
  bool is_reserved(Address address, std::size_t num_bytes) const;
  bool overlaps_mapping(Address address, std::size_t num_bytes) const;

  const std::string backend_;
  const std::size_t granularity_;
  std::map<Address, std::size_t> reservations_;          // start -> num_bytes
  std::map<Address, Mapping> mappings_;                  // start -> mapping
  std::unordered_map<std::uint64_t, Memory> memories_;   // Handle::value -> memory
};

}  // namespace sgl_vmm
