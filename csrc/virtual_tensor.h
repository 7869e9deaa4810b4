// The virtual expert tensor: slots of one size, one after the other in reserved addresses, of which
// only the mapped ones have pages behind them (ExpertWeave section 4.2).
//
//   slot s occupies bytes [s*S, (s+1)*S);  page p occupies bytes [p*P, (p+1)*P)
//
//   bytes of a page                        owner                       who gives the page back
//   ---------------------------------      ------------------------    ---------------------------
//   [p*P, (p+1)*P) in no mapped slot       nobody: no page is there    -
//   all in one mapped slot                 that slot                   its unmap
//   in several mapped slots                all of them (num_refs[p])   the unmap of the last
//   edge page, rest in unmapped slots      its mapped slots; the rest  the unmap of its last
//                                          is reserved for the others  mapped slot
//   idle: num_refs 0, but a page is there  this tensor (an unmap       the next map uses it, the
//                                          failed in the backend)      next unmap tries again
//
// Experts are not multiples of a page (DeepSeek-V2-Lite: 5.5 and 2.75 pages of 2 MiB), so neighbours
// share edge pages, and unmapping a slot leaves its neighbour's half page alone.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "page_pool.h"

namespace sgl_vmm {

struct TensorState {
  std::size_t slot_bytes = 0;
  std::size_t num_slots = 0;
  std::size_t num_mapped_slots = 0;
  std::size_t reserved_bytes = 0;  // addresses, whole pages
  std::size_t num_pages = 0;       // behind them
  std::size_t num_shared_pages = 0;  // of them in more than one mapped slot
};

class VirtualTensor {
 public:
  // Reserves addresses for `num_slots`; maps nothing.
  VirtualTensor(std::shared_ptr<PagePool> pool, std::size_t num_slots, std::size_t slot_bytes);
  ~VirtualTensor();
  VirtualTensor(const VirtualTensor&) = delete;
  VirtualTensor& operator=(const VirtualTensor&) = delete;

  Address address() const { return address_; }
  std::size_t num_slots() const { return num_slots_; }
  std::size_t slot_bytes() const { return slot_bytes_; }
  std::size_t page_bytes() const { return page_bytes_; }
  const Backend& backend() const { return pool_->backend(); }

  // Puts pages behind slots [first, first + count), content undefined. All or nothing. Throws
  // kSlotMapped if one of them is mapped, kExhausted if the pool runs dry.
  void map_slots(std::size_t first, std::size_t count);
  // Takes the pages back that no mapped slot needs any more. Slots that are not mapped are passed
  // over. If the backend fails, the slots are unmapped all the same and their pages stay idle;
  // the same call again tries again.
  void unmap_slots(std::size_t first, std::size_t count);

  // Pages that map_slots of these (unmapped) slots would take from the pool.
  std::size_t num_missing_pages(std::size_t first, std::size_t count) const;
  bool is_mapped(std::size_t slot) const;
  TensorState state() const;
  // For each page in order, how many mapped slots lie on it.
  std::vector<std::uint32_t> page_refs() const;
  // For each page in order, the handle behind it; none where no mapped slot lies on it. A handle is
  // good until the slots on its page are unmapped.
  std::vector<std::optional<Handle>> page_handles() const;
  // For each slot in order, whether it is mapped.
  std::vector<bool> mapped_slots() const;
  // Throws kIntegrity when pages, references and mapped slots contradict each other.
  void check_integrity() const;

 private:
  static constexpr PageId kNoPage = static_cast<PageId>(-1);

  struct PageRange {
    std::size_t begin;
    std::size_t end;
  };

  PageRange pages_of(std::size_t first, std::size_t count) const;
  void check_slots(std::size_t first, std::size_t count) const;
  std::vector<std::size_t> missing_locked(PageRange range) const;
  std::vector<std::size_t> idle_locked(PageRange range) const;
  void back_pages_locked(PageRange range);
  void add_refs_locked(std::size_t slot);
  void drop_refs_locked(std::size_t slot);
  enum class Are { kMapped, kMaybeMapped };
  void unmap_run_locked(const std::vector<std::size_t>& positions, Are expected);

  const std::shared_ptr<PagePool> pool_;
  const std::size_t num_slots_;
  const std::size_t slot_bytes_;
  const std::size_t page_bytes_;
  std::size_t reserved_bytes_ = 0;
  Address address_ = 0;

  mutable std::mutex mutex_;          // guards everything below
  std::vector<PageId> page_table_;    // page of each position; kNoPage = none
  std::vector<std::uint32_t> num_refs_;  // mapped slots on each position
  std::vector<bool> is_mapped_;       // by slot
};

}  // namespace sgl_vmm
