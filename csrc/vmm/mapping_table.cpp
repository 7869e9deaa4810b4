#include "vmm/mapping_table.h"

#include <algorithm>
#include <iterator>
#include <sstream>
#include <utility>

namespace sgl_vmm {
namespace {

std::string range_text(Address address, std::size_t num_bytes) {
  std::ostringstream text;
  text << "[0x" << std::hex << address << ", 0x" << address + num_bytes << ")";
  return text.str();
}

}  // namespace

void MappingTable::refuse(ErrorKind kind, const std::string& what) const {
  throw VmmError(kind, backend_ + ": " + what);
}

void MappingTable::check_reserve(std::size_t num_bytes, std::size_t alignment) const {
  check_create(num_bytes);
  if (alignment && !is_power_of_two(alignment)) {
    refuse(ErrorKind::kInvalidArgument,
           "alignment " + std::to_string(alignment) + " is not a power of two");
  }
}

void MappingTable::record_reserve(Address address, std::size_t num_bytes) {
  reservations_[address] = num_bytes;
}

void MappingTable::check_release(Address address, std::size_t num_bytes) const {
  const auto found = reservations_.find(address);
  if (found == reservations_.end() || found->second != num_bytes) {
    refuse(ErrorKind::kInvalidArgument, range_text(address, num_bytes) + " is no reservation");
  }
  if (overlaps_mapping(address, num_bytes)) {
    refuse(ErrorKind::kPageMapped,
           range_text(address, num_bytes) + " has mappings: unmap before release");
  }
}

void MappingTable::record_release(Address address) { reservations_.erase(address); }

void MappingTable::check_create(std::size_t num_bytes) const {
  if (!num_bytes || num_bytes % granularity_) {
    refuse(ErrorKind::kInvalidArgument, std::to_string(num_bytes) +
                                            " bytes is no positive multiple of the granularity " +
                                            std::to_string(granularity_));
  }
}

void MappingTable::record_create(Handle handle, std::size_t num_bytes) {
  ++memories_.try_emplace(handle.value, Memory{num_bytes, 0, 0}).first->second.num_owners;
}

std::size_t MappingTable::check_handle(Handle handle) const {
  const auto found = memories_.find(handle.value);
  if (found == memories_.end()) {
    refuse(ErrorKind::kInvalidArgument, "no handle " + std::to_string(handle.value));
  }
  return found->second.num_bytes;
}

void MappingTable::check_destroy(Handle handle) const {
  check_handle(handle);
  const Memory& memory = memories_.at(handle.value);
  if (memory.num_owners == 1 && memory.num_mappings) {
    refuse(ErrorKind::kPageMapped, "handle " + std::to_string(handle.value) + " is mapped at " +
                                       std::to_string(memory.num_mappings) +
                                       " addresses: unmap before destroy");
  }
}

void MappingTable::record_destroy(Handle handle) {
  const auto found = memories_.find(handle.value);
  if (--found->second.num_owners == 0) memories_.erase(found);
}

void MappingTable::check_map(Address address, std::size_t num_bytes, Handle handle) const {
  if (address % granularity_) {
    refuse(ErrorKind::kInvalidArgument, range_text(address, num_bytes) +
                                            " does not start at a multiple of the granularity " +
                                            std::to_string(granularity_));
  }
  const std::size_t handle_num_bytes = check_handle(handle);
  if (handle_num_bytes != num_bytes) {
    refuse(ErrorKind::kInvalidArgument, "a map of " + std::to_string(num_bytes) +
                                            " bytes, but the handle has " +
                                            std::to_string(handle_num_bytes));
  }
  if (!is_reserved(address, num_bytes)) {
    refuse(ErrorKind::kInvalidArgument, range_text(address, num_bytes) + " is not reserved");
  }
  if (overlaps_mapping(address, num_bytes)) {
    refuse(ErrorKind::kInvalidArgument, range_text(address, num_bytes) + " is already mapped");
  }
}

void MappingTable::record_map(Address address, std::size_t num_bytes, Handle handle) {
  mappings_[address] = Mapping{num_bytes, handle, false};
  ++memories_.at(handle.value).num_mappings;
}

void MappingTable::check_unmap(Address address, std::size_t num_bytes) const {
  const auto found = mappings_.find(address);
  if (found == mappings_.end() || found->second.num_bytes != num_bytes) {
    refuse(ErrorKind::kInvalidArgument, range_text(address, num_bytes) + " is no earlier map");
  }
}

void MappingTable::record_unmap(Address address) {
  const auto found = mappings_.find(address);
  --memories_.at(found->second.handle.value).num_mappings;
  mappings_.erase(found);
}

void MappingTable::check_mapped(Address address, std::size_t num_bytes) const {
  const Address end = address + num_bytes;
  Address next = address;
  for (auto mapping = mappings_.find(address);
       next < end && mapping != mappings_.end() && mapping->first == next; ++mapping) {
    next += mapping->second.num_bytes;
  }
  if (!num_bytes || next != end) {
    refuse(ErrorKind::kInvalidArgument,
           range_text(address, num_bytes) + " is not a run of whole mappings");
  }
}

void MappingTable::record_access(Address address, std::size_t num_bytes) {
  const auto end = mappings_.lower_bound(address + num_bytes);
  for (auto mapping = mappings_.find(address); mapping != end; ++mapping) {
    mapping->second.has_access = true;
  }
}

void MappingTable::check_covered(Address address, std::size_t num_bytes) const {
  const Address end = address + num_bytes;
  Address next = address;
  auto mapping = mappings_.upper_bound(address);
  if (mapping != mappings_.begin()) --mapping;
  for (; next < end && mapping != mappings_.end() && mapping->first <= next; ++mapping) {
    if (!mapping->second.has_access) continue;
    next = std::max(next, mapping->first + mapping->second.num_bytes);
  }
  if (end <= address || next < end) {  // at once: no bytes, or more than addresses
    refuse(ErrorKind::kInvalidArgument,
           range_text(address, num_bytes) + " is not wholly mapped with access");
  }
}

void MappingTable::check_copy(Address destination, Address source, std::size_t num_bytes) const {
  check_covered(destination, num_bytes);
  check_covered(source, num_bytes);
  if (ranges_overlap(destination, source, num_bytes)) {
    refuse(ErrorKind::kInvalidArgument, range_text(source, num_bytes) + " overlaps its copy at " +
                                            range_text(destination, num_bytes));
  }
}

bool MappingTable::is_reserved(Address address, std::size_t num_bytes) const {
  auto after = reservations_.upper_bound(address);
  if (after == reservations_.begin()) return false;
  const auto& [start, size] = *std::prev(after);
  return num_bytes <= size && address - start <= size - num_bytes;
}

bool MappingTable::overlaps_mapping(Address address, std::size_t num_bytes) const {
  const auto after = mappings_.lower_bound(address);
  if (after != mappings_.end() && after->first - address < num_bytes) return true;
  if (after == mappings_.begin()) return false;
  const auto& [start, mapping] = *std::prev(after);
  return address - start < mapping.num_bytes;
}

}  // namespace sgl_vmm
