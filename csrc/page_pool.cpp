#include "page_pool.h"

#include <algorithm>
#include <iterator>
#include <string>

namespace sgl_vmm {
namespace {

std::string mib(std::size_t num_bytes) {
  return std::to_string(num_bytes >> 20) + "." +
         std::to_string((num_bytes % (std::size_t{1} << 20)) * 10 >> 20) + " MiB";
}

}  // namespace

PagePool::PagePool(BackendPtr backend, std::size_t page_bytes, const PoolLimits& limits)
    : backend_(std::move(backend)), page_bytes_(page_bytes), limits_(limits) {
  if (page_bytes_ == 0 || page_bytes_ % backend_->granularity() != 0) {
    throw VmmError(ErrorKind::kBadGranularity,
                   "page size " + std::to_string(page_bytes_) + " bytes is not a multiple of " +
                       backend_->name() + "'s granularity, " +
                       std::to_string(backend_->granularity()));
  }
  if (limits_.min_free_pages > limits_.max_free_pages) {
    throw VmmError(ErrorKind::kInvalidArgument, "the low water mark is above the high one");
  }
  preallocate(limits_.min_free_pages);
}

PagePool::~PagePool() {
  for (PageId page = 0; page < pages_.size(); ++page) {
    if (!pages_[page].exists) continue;
    try {
      backend_->destroy(pages_[page].handle);
    } catch (const VmmError&) {  // a destructor cannot report; the process's end frees the rest
    }
  }
}

std::vector<PageId> PagePool::take(std::size_t count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  grow_locked(count);
  const auto end = std::next(free_.begin(), static_cast<std::ptrdiff_t>(count));
  std::vector<PageId> taken(free_.begin(), end);
  free_.erase(free_.begin(), end);
  for (const PageId page : taken) pages_[page].is_free = false;
  const std::size_t num_used = pages_.size() - absent_.size() - free_.size();
  if (num_used > peak_used_) peak_used_ = num_used;
  return taken;
}

void PagePool::give_back(const std::vector<PageId>& pages) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::set<PageId> distinct(pages.begin(), pages.end());
  for (const PageId page : distinct) {
    if (distinct.size() != pages.size() || page >= pages_.size() || !pages_[page].exists ||
        pages_[page].is_free) {
      throw VmmError(ErrorKind::kInvalidArgument,
                     "page " + std::to_string(page) + " is not one that was handed out");
    }
  }
  for (const PageId page : distinct) {
    pages_[page].is_free = true;
    free_.insert(page);
  }
  trim_quietly_locked(limits_.max_free_pages);
}

void PagePool::set_max_pages(std::size_t max_pages) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::size_t num_existing = pages_.size() - absent_.size();
  if (max_pages < num_existing) {
    throw VmmError(ErrorKind::kInvalidArgument,
                   "page pool: a budget of " + std::to_string(max_pages) + " pages is below the " +
                       std::to_string(num_existing) + " that exist");
  }
  limits_.max_pages = max_pages;
}

void PagePool::preallocate(std::size_t num_free) {
  const std::lock_guard<std::mutex> lock(mutex_);
  grow_locked(num_free);
}

void PagePool::trim(std::size_t num_free) {
  const std::lock_guard<std::mutex> lock(mutex_);
  trim_locked(std::max(num_free, limits_.min_free_pages));
}

Handle PagePool::handle(PageId page) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (page >= pages_.size() || !pages_[page].exists) {
    throw VmmError(ErrorKind::kInvalidArgument, "no page " + std::to_string(page));
  }
  return pages_[page].handle;
}

PoolState PagePool::state() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  PoolState state;
  state.page_bytes = page_bytes_;
  state.max_pages = limits_.max_pages;
  state.num_pages = pages_.size() - absent_.size();
  state.num_free = free_.size();
  state.num_used = state.num_pages - state.num_free;
  state.peak_used = peak_used_;
  state.num_created = num_created_;
  state.num_destroyed = num_destroyed_;
  return state;
}

void PagePool::check_integrity() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::size_t num_free = 0;
  std::size_t num_absent = 0;
  for (PageId page = 0; page < pages_.size(); ++page) {
    num_free += pages_[page].exists && pages_[page].is_free && free_.count(page);
    num_absent += !pages_[page].exists && absent_.count(page);
  }
  const std::size_t num_existing = pages_.size() - absent_.size();
  if (num_free != free_.size() || num_absent != absent_.size() ||
      num_created_ - num_destroyed_ != num_existing || num_existing > limits_.max_pages) {
    throw VmmError(ErrorKind::kIntegrity,
                   "pool: " + std::to_string(num_free) + " pages are marked free, " +
                       std::to_string(free_.size()) + " are listed; " +
                       std::to_string(num_created_) + " created - " +
                       std::to_string(num_destroyed_) + " destroyed, " +
                       std::to_string(num_existing) + " exist");
  }
}

// All or nothing: pages that were made before a failure go back to the device.
void PagePool::grow_locked(std::size_t num_free) {
  const std::size_t num_before = free_.size();
  const std::size_t num_existing = pages_.size() - absent_.size();
  const std::size_t missing = num_free > num_before ? num_free - num_before : 0;
  if (missing > limits_.max_pages - num_existing) {
    throw VmmError(ErrorKind::kExhausted,
                   "page pool: " + std::to_string(num_free) + " pages (" +
                       mib(num_free * page_bytes_) + ") are needed, " +
                       std::to_string(num_before) + " are free and the budget of " +
                       std::to_string(limits_.max_pages) + " pages (" +
                       mib(limits_.max_pages * page_bytes_) + ") leaves room for " +
                       std::to_string(limits_.max_pages - num_existing) + " more");
  }
  std::vector<Handle> created;
  try {
    if (missing > 0) backend_->create_run(page_bytes_, missing, created);
  } catch (const VmmError&) {
    for (const Handle handle : created) add_locked(handle);
    trim_quietly_locked(num_before);
    throw;
  }
  for (const Handle handle : created) add_locked(handle);
}

void PagePool::add_locked(Handle handle) {
  PageId page = pages_.size();
  if (absent_.empty()) {
    pages_.emplace_back();
  } else {
    page = *absent_.begin();
    absent_.erase(absent_.begin());
  }
  pages_[page] = Page{handle, true, true};
  free_.insert(page);
  ++num_created_;
}

void PagePool::destroy_locked(PageId page) {
  backend_->destroy(pages_[page].handle);
  pages_[page] = Page{};
  free_.erase(page);
  absent_.insert(page);
  ++num_destroyed_;
}

// Highest ids first, so that what stays is one run where possible.
void PagePool::trim_locked(std::size_t num_free) {
  while (free_.size() > num_free) destroy_locked(*free_.rbegin());
}

// A page that the device does not take back stays free here, and may be handed out again.
void PagePool::trim_quietly_locked(std::size_t num_free) {
  try {
    trim_locked(num_free);
  } catch (const VmmError&) {
  }
}

}  // namespace sgl_vmm
