// The page pool of one device: pages made ahead of time, handed out, taken back.
//
//   backend --create--> [free] --take--> in use (virtual_tensor.h) --give_back--> [free]
//                         |--trim--> destroyed
//
// Creating a page costs 10 to 100 times a mapping on a GPU, and half to four times a copy of it on
// the host, so pages are kept. Water marks: at least `min_free_pages` are made when the pool is,
// and stay; beyond `max_free_pages` a page that comes back is destroyed.
// The budget bounds all pages together, free ones included.
#pragma once

#include <cstddef>
#include <limits>
#include <mutex>
#include <set>
#include <vector>

#include "vmm/backend.h"

namespace sgl_vmm {

using PageId = std::size_t;

constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();

struct PoolLimits {
  std::size_t max_pages = kNoLimit;       // the byte budget, in pages
  std::size_t min_free_pages = 0;         // low water mark
  std::size_t max_free_pages = kNoLimit;  // high water mark
};

// All of it read under one lock.
struct PoolState {
  std::size_t page_bytes = 0;
  std::size_t max_pages = 0;
  std::size_t num_pages = 0;       // that exist: free + used
  std::size_t num_free = 0;
  std::size_t num_used = 0;
  std::size_t peak_used = 0;
  std::size_t num_created = 0;     // since the pool was made
  std::size_t num_destroyed = 0;
};

class PagePool {
 public:
  // Creates `limits.min_free_pages` at once. `page_bytes` is a multiple of the granularity.
  PagePool(BackendPtr backend, std::size_t page_bytes, const PoolLimits& limits);
  ~PagePool();  // its tensors hold it, so no page is mapped by then
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  Backend& backend() const { return *backend_; }
  std::size_t page_bytes() const { return page_bytes_; }

  // `count` pages of undefined content, lowest ids first; creates what is missing.
  // All or nothing: throws kExhausted beyond the budget or the device's memory.
  std::vector<PageId> take(std::size_t count);
  // Takes pages back, and returns to the device what lies above the high water mark.
  // Throws kInvalidArgument for a page that is free already, before anything happens.
  void give_back(const std::vector<PageId>& pages);

  // From now on at most so many pages; throws kInvalidArgument below those that exist.
  void set_max_pages(std::size_t max_pages);

  // Creates pages until `num_free` are free. All or nothing.
  void preallocate(std::size_t num_free);
  // Destroys free pages until `num_free` are left, but never goes below the low water mark.
  void trim(std::size_t num_free);

  Handle handle(PageId page) const;
  PoolState state() const;
  // Throws kIntegrity when free and used pages do not add up.
  void check_integrity() const;

 private:
  struct Page {
    Handle handle;
    bool exists = false;
    bool is_free = false;
  };

  void grow_locked(std::size_t num_free);
  void add_locked(Handle handle);
  void destroy_locked(PageId page);
  void trim_locked(std::size_t num_free);
  void trim_quietly_locked(std::size_t num_free);

  const BackendPtr backend_;
  const std::size_t page_bytes_;

  mutable std::mutex mutex_;  // guards everything below
  PoolLimits limits_;
  std::vector<Page> pages_;   // by id; ids of destroyed pages are used again
  std::set<PageId> free_;
  std::set<PageId> absent_;
  std::size_t peak_used_ = 0;
  std::size_t num_created_ = 0;
  std::size_t num_destroyed_ = 0;
};

}  // namespace sgl_vmm
