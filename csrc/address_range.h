// Reserved addresses for pages that belong to somebody else: another process's, imported, or one
// page many times over.
//
//   worker: virtual_tensor.h --page_handles, export--> engine: import --> [AddressRange] --> torch
//
// It maps and unmaps, and never creates or destroys a page: whoever imported a handle destroys it,
// after it was unmapped here. The addresses stay the same for the range's whole life, so what was
// built upon them (a captured graph) stays valid while pages come and go.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "vmm/backend.h"

namespace sgl_vmm {

class AddressRange {
 public:
  // Reserves `num_bytes`, rounded up to whole pages; maps nothing. `page_bytes` is a multiple of
  // the backend's granularity, and the size of every handle.
  AddressRange(BackendPtr backend, std::size_t num_bytes, std::size_t page_bytes);
  ~AddressRange();
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;

  Address address() const { return address_; }
  std::size_t num_bytes() const { return num_bytes_; }
  std::size_t page_bytes() const { return page_bytes_; }
  const Backend& backend() const { return *backend_; }

  // Puts `handles` behind pages [first_page, first_page + handles.size()), in order; one handle may
  // be there many times. All or nothing. Throws kPageMapped if something is mapped at one of them.
  // Where the backend fails and then cannot unmap a page either, that page stays mapped.
  void map(std::size_t first_page, const std::vector<Handle>& handles);
  // Pages that are not mapped are passed over. If the backend fails at some, the others are
  // unmapped, those stay mapped, and the same call tries again.
  void unmap(std::size_t first_page, std::size_t count);
  // For each page in order, whether something is mapped there.
  std::vector<bool> mapped_pages() const;

 private:
  Address page_address(std::size_t page) const { return address_ + page * page_bytes_; }
  void check_pages(std::size_t first_page, std::size_t count) const;
  void note_leftovers_locked(std::size_t first_page, std::size_t count);

  const BackendPtr backend_;
  const std::size_t page_bytes_;
  std::size_t num_bytes_ = 0;
  Address address_ = 0;

  mutable std::mutex mutex_;  // guards everything below
  std::vector<bool> is_mapped_;  // by page
};

}  // namespace sgl_vmm
