#include "address_range.h"

#include <algorithm>
#include <optional>
#include <string>

#include "page_pool.h"

namespace sgl_vmm {

AddressRange::AddressRange(BackendPtr backend, std::size_t num_bytes, std::size_t page_bytes)
    : backend_(std::move(backend)), page_bytes_(page_bytes) {
  if (page_bytes_ == 0 || page_bytes_ % backend_->granularity() != 0) {
    throw VmmError(ErrorKind::kBadGranularity,
                   "page size " + std::to_string(page_bytes_) + " bytes is not a multiple of " +
                       backend_->name() + "'s granularity, " +
                       std::to_string(backend_->granularity()));
  }
  if (num_bytes == 0 || num_bytes > kNoLimit / 2) {
    throw VmmError(ErrorKind::kInvalidArgument,
                   std::to_string(num_bytes) + " bytes are no range of addresses");
  }
  const std::size_t num_pages = (num_bytes - 1) / page_bytes_ + 1;
  num_bytes_ = num_pages * page_bytes_;
  is_mapped_.assign(num_pages, false);
  address_ = backend_->reserve(num_bytes_, backend_->granularity());
}

AddressRange::~AddressRange() {
  try {
    unmap(0, is_mapped_.size());
    backend_->release(address_, num_bytes_);
  } catch (const VmmError&) {  // a destructor cannot report; the process's end frees the rest
  }
}

void AddressRange::map(std::size_t first_page, const std::vector<Handle>& handles) {
  check_pages(first_page, handles.size());
  if (handles.empty()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto first = is_mapped_.begin() + static_cast<std::ptrdiff_t>(first_page);
  const auto last = first + static_cast<std::ptrdiff_t>(handles.size());
  if (const auto taken = std::find(first, last, true); taken != last) {
    throw VmmError(ErrorKind::kPageMapped,
                   "page " + std::to_string(taken - is_mapped_.begin()) +
                       " of the range is mapped already: unmap it before");
  }
  try {
    backend_->map_run(page_address(first_page), page_bytes_, handles);
  } catch (const VmmError&) {
    note_leftovers_locked(first_page, handles.size());
    throw;
  }
  std::fill(first, last, true);
}

void AddressRange::unmap(std::size_t first_page, std::size_t count) {
  check_pages(first_page, count);
  const std::lock_guard<std::mutex> lock(mutex_);
  std::optional<VmmError> failure;
  for (std::size_t page = first_page; page < first_page + count; ++page) {
    if (!is_mapped_[page]) continue;
    try {
      backend_->unmap(page_address(page), page_bytes_);
      is_mapped_[page] = false;
    } catch (const VmmError& error) {
      if (!failure) failure.emplace(error);
    }
  }
  if (failure) throw *failure;
}

std::vector<bool> AddressRange::mapped_pages() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_mapped_;
}

void AddressRange::check_pages(std::size_t first_page, std::size_t count) const {
  const std::size_t num_pages = num_bytes_ / page_bytes_;
  if (first_page > num_pages || count > num_pages - first_page) {
    throw VmmError(ErrorKind::kInvalidArgument,
                   std::to_string(count) + " pages from " + std::to_string(first_page) +
                       " on are not in a range of " + std::to_string(num_pages));
  }
}

// After a map_run that failed: what it could not unmap is still there. Only unmapping again tells.
void AddressRange::note_leftovers_locked(std::size_t first_page, std::size_t count) {
  for (std::size_t page = first_page; page < first_page + count; ++page) {
    try {
      backend_->unmap(page_address(page), page_bytes_);
    } catch (const VmmError& error) {
      // The backend's own refusal, before any vendor's call: nothing is mapped there.
      const bool is_unmapped = error.kind == ErrorKind::kInvalidArgument && error.call.empty();
      is_mapped_[page] = !is_unmapped;
    }
  }
}

}  // namespace sgl_vmm
