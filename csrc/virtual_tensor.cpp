#include "virtual_tensor.h"

#include <algorithm>
#include <string>

namespace sgl_vmm {
namespace {

// Calls `visit(begin, end)` for each run of consecutive numbers in ascending `positions`.
template <typename Visit>
void for_each_run(const std::vector<std::size_t>& positions, Visit visit) {
  for (std::size_t begin = 0; begin < positions.size();) {
    std::size_t end = begin + 1;
    while (end < positions.size() && positions[end] == positions[end - 1] + 1) ++end;
    visit(begin, end);
    begin = end;
  }
}

std::string slot_range(std::size_t first, std::size_t count) {
  return "[" + std::to_string(first) + ", " + std::to_string(first + count) + ")";
}

}  // namespace

VirtualTensor::VirtualTensor(std::shared_ptr<PagePool> pool, std::size_t num_slots,
                             std::size_t slot_bytes)
    : pool_(std::move(pool)),
      num_slots_(num_slots),
      slot_bytes_(slot_bytes),
      page_bytes_(pool_->page_bytes()) {
  if (num_slots_ == 0 || slot_bytes_ == 0 || num_slots_ > kNoLimit / 2 / slot_bytes_) {
    throw VmmError(ErrorKind::kInvalidArgument, std::to_string(num_slots_) + " slots of " +
                                                    std::to_string(slot_bytes_) +
                                                    " bytes are no tensor");
  }
  const std::size_t num_pages = (num_slots_ * slot_bytes_ + page_bytes_ - 1) / page_bytes_;
  reserved_bytes_ = num_pages * page_bytes_;
  page_table_.assign(num_pages, kNoPage);
  num_refs_.assign(num_pages, 0);
  is_mapped_.assign(num_slots_, false);
  address_ = pool_->backend().reserve(reserved_bytes_, pool_->backend().granularity());
}

VirtualTensor::~VirtualTensor() {
  try {
    unmap_slots(0, num_slots_);
    pool_->backend().release(address_, reserved_bytes_);
  } catch (const VmmError&) {  // a destructor cannot report; the process's end frees the rest
  }
}

void VirtualTensor::map_slots(std::size_t first, std::size_t count) {
  check_slots(first, count);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (std::size_t slot = first; slot < first + count; ++slot) {
    if (is_mapped_[slot]) {
      throw VmmError(ErrorKind::kSlotMapped, "slot " + std::to_string(slot) + " of " +
                                                 slot_range(first, count) + " is mapped already");
    }
  }
  back_pages_locked(pages_of(first, count));
  for (std::size_t slot = first; slot < first + count; ++slot) add_refs_locked(slot);
}

void VirtualTensor::unmap_slots(std::size_t first, std::size_t count) {
  check_slots(first, count);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (std::size_t slot = first; slot < first + count; ++slot) {
    if (is_mapped_[slot]) drop_refs_locked(slot);
  }
  unmap_run_locked(idle_locked(pages_of(first, count)), Are::kMapped);
}

std::size_t VirtualTensor::num_missing_pages(std::size_t first, std::size_t count) const {
  check_slots(first, count);
  const std::lock_guard<std::mutex> lock(mutex_);
  return missing_locked(pages_of(first, count)).size();
}

bool VirtualTensor::is_mapped(std::size_t slot) const {
  check_slots(slot, 1);
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_mapped_[slot];
}

TensorState VirtualTensor::state() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  TensorState state;
  state.slot_bytes = slot_bytes_;
  state.num_slots = num_slots_;
  state.num_mapped_slots = static_cast<std::size_t>(
      std::count(is_mapped_.begin(), is_mapped_.end(), true));
  state.reserved_bytes = reserved_bytes_;
  for (std::size_t position = 0; position < page_table_.size(); ++position) {
    state.num_pages += page_table_[position] != kNoPage;
    state.num_shared_pages += num_refs_[position] > 1;
  }
  return state;
}

std::vector<std::uint32_t> VirtualTensor::page_refs() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_refs_;
}

std::vector<std::optional<Handle>> VirtualTensor::page_handles() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::optional<Handle>> handles(page_table_.size());
  for (std::size_t position = 0; position < handles.size(); ++position) {
    if (num_refs_[position] > 0) handles[position] = pool_->handle(page_table_[position]);
  }
  return handles;
}

std::vector<bool> VirtualTensor::mapped_slots() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_mapped_;
}

void VirtualTensor::check_integrity() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::uint32_t> wanted(num_refs_.size(), 0);
  for (std::size_t slot = 0; slot < num_slots_; ++slot) {
    if (!is_mapped_[slot]) continue;
    const PageRange range = pages_of(slot, 1);
    for (std::size_t position = range.begin; position < range.end; ++position) ++wanted[position];
  }
  std::vector<PageId> held;
  for (std::size_t position = 0; position < wanted.size(); ++position) {
    const PageId page = page_table_[position];
    if (wanted[position] != num_refs_[position] || (wanted[position] > 0 && page == kNoPage)) {
      throw VmmError(ErrorKind::kIntegrity,
                     "page position " + std::to_string(position) + ": " +
                         std::to_string(wanted[position]) + " mapped slots lie on it, " +
                         std::to_string(num_refs_[position]) + " references are counted" +
                         (page == kNoPage ? ", no page is there" : ""));
    }
    if (page != kNoPage) held.push_back(page);
  }
  std::sort(held.begin(), held.end());
  if (std::adjacent_find(held.begin(), held.end()) != held.end()) {
    throw VmmError(ErrorKind::kIntegrity, "one page is at two positions of a tensor");
  }
}

VirtualTensor::PageRange VirtualTensor::pages_of(std::size_t first, std::size_t count) const {
  return {first * slot_bytes_ / page_bytes_,
          count ? ((first + count) * slot_bytes_ + page_bytes_ - 1) / page_bytes_
                : first * slot_bytes_ / page_bytes_};
}

void VirtualTensor::check_slots(std::size_t first, std::size_t count) const {
  if (first > num_slots_ || count > num_slots_ - first) {
    throw VmmError(ErrorKind::kInvalidArgument, "slots " + slot_range(first, count) +
                                                    " are not in [0, " +
                                                    std::to_string(num_slots_) + ")");
  }
}

std::vector<std::size_t> VirtualTensor::missing_locked(PageRange range) const {
  std::vector<std::size_t> missing;
  for (std::size_t position = range.begin; position < range.end; ++position) {
    if (page_table_[position] == kNoPage) missing.push_back(position);
  }
  return missing;
}

// All or nothing: what was mapped before a failure is unmapped, every page goes back. Where the
// unmapping fails too, the page stays idle: given back, it would be handed out while still mapped.
// An idle page of an earlier failure may be mapped without access.
void VirtualTensor::back_pages_locked(PageRange range) {
  const std::vector<std::size_t> missing = missing_locked(range);
  const std::vector<std::size_t> idle = idle_locked(range);
  for_each_run(idle, [&](std::size_t begin, std::size_t end) {
    pool_->backend().set_access(address_ + idle[begin] * page_bytes_, (end - begin) * page_bytes_);
  });
  const std::vector<PageId> pages = pool_->take(missing.size());
  for (std::size_t i = 0; i < missing.size(); ++i) page_table_[missing[i]] = pages[i];
  try {
    for_each_run(missing, [&](std::size_t begin, std::size_t end) {
      std::vector<Handle> handles;
      for (std::size_t i = begin; i < end; ++i) handles.push_back(pool_->handle(pages[i]));
      pool_->backend().map_run(address_ + missing[begin] * page_bytes_, page_bytes_, handles);
    });
  } catch (const VmmError&) {
    try {
      unmap_run_locked(missing, Are::kMaybeMapped);
    } catch (const VmmError&) {  // the first failure is the one to tell
    }
    throw;
  }
}

void VirtualTensor::add_refs_locked(std::size_t slot) {
  const PageRange range = pages_of(slot, 1);
  for (std::size_t position = range.begin; position < range.end; ++position) ++num_refs_[position];
  is_mapped_[slot] = true;
}

void VirtualTensor::drop_refs_locked(std::size_t slot) {
  const PageRange range = pages_of(slot, 1);
  for (std::size_t position = range.begin; position < range.end; ++position) --num_refs_[position];
  is_mapped_[slot] = false;
}

std::vector<std::size_t> VirtualTensor::idle_locked(PageRange range) const {
  std::vector<std::size_t> idle;
  for (std::size_t position = range.begin; position < range.end; ++position) {
    if (num_refs_[position] == 0 && page_table_[position] != kNoPage) idle.push_back(position);
  }
  return idle;
}

// Unmaps and gives back as many of these pages as the backend lets go, then tells what failed.
void VirtualTensor::unmap_run_locked(const std::vector<std::size_t>& positions, Are expected) {
  std::vector<PageId> freed;
  std::unique_ptr<VmmError> failure;
  for (const std::size_t position : positions) {
    try {
      pool_->backend().unmap(address_ + position * page_bytes_, page_bytes_);
    } catch (const VmmError& error) {
      // The backend's own refusal, before any vendor's call: nothing is mapped there.
      const bool is_unmapped = error.kind == ErrorKind::kInvalidArgument && error.call.empty();
      if (expected == Are::kMapped || !is_unmapped) {
        if (!failure) failure = std::make_unique<VmmError>(error);
        continue;
      }
    }
    freed.push_back(page_table_[position]);
    page_table_[position] = kNoPage;
  }
  pool_->give_back(freed);
  if (failure) throw *failure;
}

}  // namespace sgl_vmm
