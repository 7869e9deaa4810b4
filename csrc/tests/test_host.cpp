// vmm/host.cpp: the one backend whose memory is real everywhere.
#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>

#include "tests/support.h"

using namespace support;

namespace {

// Writes to each 4 KiB and counts the page faults. Not instrumented: a sanitizer's shadow faults.
__attribute__((no_sanitize("address", "undefined"))) long faults_of_touching(Address address,
                                                                             std::size_t num_bytes) {
  rusage before{};
  rusage after{};
  getrusage(RUSAGE_SELF, &before);
  for (std::size_t at = 0; at < num_bytes; at += 4096) {
    *reinterpret_cast<volatile std::uint8_t*>(address + at) = 1;
  }
  getrusage(RUSAGE_SELF, &after);
  return after.ru_minflt - before.ru_minflt;
}

BackendOptions host_of(std::size_t page_bytes) {
  BackendOptions options;
  options.page_bytes = page_bytes;
  options.capacity_bytes = std::size_t{16} << 20;
  return options;
}

}  // namespace

TEST(page_size_is_a_power_of_two_and_not_below_the_systems) {
  CHECK_THROWS(kBadGranularity, open_backend("host", host_of(3 * 4096)));
  CHECK_THROWS(kBadGranularity, open_backend("host", host_of(2048)));
  CHECK_THROWS(kBadGranularity, open_backend("host", host_of(0)));
  CHECK_EQ(open_backend("host", host_of(4096))->granularity(), std::size_t{4096});
}

TEST(unknown_backend_is_refused) {
  CHECK_THROWS(kInvalidArgument, open_backend("tpu", BackendOptions()));
}

TEST(capacity_is_rounded_up_to_pages_and_then_ends) {
  BackendOptions options = host_of(kPage);
  options.capacity_bytes = 2 * kPage + 1;
  const BackendPtr host = open_backend("host", options);
  std::vector<Handle> handles;
  for (int i = 0; i < 3; ++i) handles.push_back(host->create(kPage));
  CHECK_THROWS(kExhausted, host->create(kPage));
  host->destroy(handles[1]);
  CHECK(host->create(kPage) == handles[1]);
}

TEST(default_capacity_is_the_machines_memory_and_costs_none_of_it) {
  const BackendPtr host = open_backend("host", BackendOptions());
  CHECK_EQ(host->granularity(), std::size_t{2} << 20);
  CHECK_EQ(host->resident_bytes().value(), std::size_t{0});
}

TEST(populated_pages_are_resident_from_their_creation_to_their_end) {
  const BackendPtr host = open_host_pages(8);
  const Handle first = host->create(kPage);
  const Handle second = host->create(kPage);
  CHECK_EQ(host->resident_bytes().value(), 2 * kPage);
  host->destroy(first);
  CHECK_EQ(host->resident_bytes().value(), kPage);
  host->destroy(second);
  CHECK_EQ(host->resident_bytes().value(), std::size_t{0});
}

TEST(a_run_of_pages_is_made_whole_or_not_at_all) {
  constexpr std::size_t kNumPages = 100;  // more than one thread's share
  const BackendPtr host = open_host_pages(kNumPages);
  std::vector<Handle> all, more;
  host->create_run(kPage, kNumPages, all);
  CHECK_EQ(all.size(), kNumPages);
  CHECK_EQ(host->resident_bytes().value(), kNumPages * kPage);
  const Address address = host->reserve(kNumPages * kPage, kPage);
  host->map_run(address, kPage, all);  // as many different pages: none is mapped twice
  CHECK(faults_of_touching(address, kNumPages * kPage) < 16);
  for (std::size_t i = 0; i < kNumPages; ++i) host->unmap(address + i * kPage, kPage);
  for (const std::size_t index : {7, 3, 99}) host->destroy(all[index]);
  CHECK_THROWS(kExhausted, host->create_run(kPage, 4, more));
  CHECK(more.empty());
  CHECK_EQ(host->resident_bytes().value(), (kNumPages - 3) * kPage);
  host->create_run(kPage, 3, more);
  CHECK(more[0] == all[3] && more[1] == all[7] && more[2] == all[99]);
}

TEST(without_populate_nothing_is_resident_until_touched) {
  const BackendPtr host = open_host_pages(8, kPage, false);
  const Handle page = host->create(kPage);
  const Address address = host->reserve(kPage, kPage);
  host->map(address, kPage, page);
  host->set_access(address, kPage);
  CHECK_EQ(host->resident_bytes().value(), std::size_t{0});
  bytes_at(address)[5000] = 1;
  const std::size_t touched = host->resident_bytes().value();
  CHECK(touched > 0 && touched <= kPage);
  host->unmap(address, kPage);
  CHECK_EQ(host->resident_bytes().value(), touched);
  host->destroy(page);
  CHECK_EQ(host->resident_bytes().value(), std::size_t{0});
}

TEST(pages_come_zeroed_also_when_used_before) {
  const BackendPtr host = open_host_pages(1);
  const Address address = host->reserve(kPage, kPage);
  for (int round = 0; round < 3; ++round) {
    const Handle page = host->create(kPage);
    host->map(address, kPage, page);
    CHECK(std::all_of(bytes_at(address), bytes_at(address) + kPage, [](int b) { return b == 0; }));
    std::memset(bytes_at(address), 0xAB, kPage);
    host->unmap(address, kPage);
    host->destroy(page);
  }
}

TEST(page_tables_move_so_nothing_is_faulted_in_again) {
  constexpr std::size_t kNumPages = 8;
  const std::size_t page_bytes = std::size_t{2} << 20;
  const BackendPtr host = open_host_pages(kNumPages, page_bytes);
  std::vector<Handle> handles;
  for (std::size_t i = 0; i < kNumPages; ++i) handles.push_back(host->create(page_bytes));
  const Address address = host->reserve(kNumPages * page_bytes, page_bytes);
  const Address second = host->reserve(page_bytes, page_bytes);
  for (int round = 0; round < 4; ++round) {
    host->map_run(address, page_bytes, handles);
    // Where the kernel has pages of 2 MiB for files, eight faults would be all.
    CHECK(faults_of_touching(address, kNumPages * page_bytes) < 4);
    for (const Handle handle : handles) {  // a second mapping takes nothing from the first
      host->map(second, page_bytes, handle);
      host->unmap(second, page_bytes);
    }
    CHECK(faults_of_touching(address, kNumPages * page_bytes) < 4);
    for (std::size_t i = 0; i < kNumPages; ++i) host->unmap(address + i * page_bytes, page_bytes);
    std::reverse(handles.begin(), handles.end());
  }
}

// Where the kernel gives huge pages, these are some; where it does not, nobody may notice.
TEST(pages_of_2_mib_and_more_are_whole_zeroed_and_written_without_a_fault) {
  for (const std::size_t num_bytes : {std::size_t{2} << 20, std::size_t{4} << 20}) {
    const BackendPtr host = open_backend("host", host_of(num_bytes));
    const Address at = host->reserve(num_bytes, num_bytes);
    for (int life = 0; life < 2; ++life) {
      const Handle page = host->create(num_bytes);
      CHECK_EQ(*host->resident_bytes(), num_bytes);
      host->map(at, num_bytes, page);
      for (std::size_t i = 0; i < num_bytes; i += 512) CHECK_EQ(int{bytes_at(at)[i]}, 0);
      CHECK(faults_of_touching(at, num_bytes) < 16);  // the test itself may have some
      host->unmap(at, num_bytes);
      host->destroy(page);
      CHECK_EQ(*host->resident_bytes(), std::size_t{0});
    }
  }
}

TEST(one_page_at_two_addresses_is_one_memory_in_either_order_of_unmapping) {
  for (const bool populate : {true, false}) {
    for (const int unmapped_first : {0, 1}) {
      const BackendPtr host = open_host_pages(4, kPage, populate);
      const Handle page = host->create(kPage);
      const Address at[] = {host->reserve(kPage, kPage), host->reserve(kPage, kPage)};
      for (const Address address : at) host->map(address, kPage, page);
      std::memcpy(bytes_at(at[0]), pattern(1, kPage), kPage);
      CHECK(!std::memcmp(bytes_at(at[1]), pattern(1, kPage), kPage));
      const Address kept = at[1 - unmapped_first];
      host->unmap(at[unmapped_first], kPage);
      CHECK(!std::memcmp(bytes_at(kept), pattern(1, kPage), kPage));
      std::memcpy(bytes_at(kept), pattern(2, kPage), kPage);
      CHECK_THROWS(kPageMapped, host->destroy(page));
      host->unmap(kept, kPage);
      host->map(at[unmapped_first], kPage, page);
      CHECK(!std::memcmp(bytes_at(at[unmapped_first]), pattern(2, kPage), kPage));
      host->unmap(at[unmapped_first], kPage);
      host->destroy(page);
    }
  }
}

TEST(contents_follow_the_handle_from_address_to_address) {
  const BackendPtr host = open_host_pages(4);
  const std::vector<Handle> handles = {host->create(kPage), host->create(kPage),
                                       host->create(kPage)};
  const Address address = host->reserve(3 * kPage, kPage);
  std::vector<std::size_t> order = {0, 1, 2};
  host->map_run(address, kPage, handles);
  for (std::size_t i = 0; i < 3; ++i) {
    std::memcpy(bytes_at(address + i * kPage), pattern(i, kPage), kPage);
    host->unmap(address + i * kPage, kPage);
  }
  do {  // consecutive and scattered pages of the arena, in one run
    host->map_run(address, kPage, {handles[order[0]], handles[order[1]], handles[order[2]]});
    for (std::size_t i = 0; i < 3; ++i) {
      CHECK(!std::memcmp(bytes_at(address + i * kPage), pattern(order[i], kPage), kPage));
    }
    for (std::size_t i = 0; i < 3; ++i) host->unmap(address + i * kPage, kPage);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(a_range_ends_where_it_ends) {
  const BackendPtr host = open_host_pages(4);
  const Address low = host->reserve(2 * kPage, kPage);
  const std::vector<Handle> pages = {host->create(kPage), host->create(kPage),
                                     host->create(kPage)};
  CHECK_THROWS(kInvalidArgument, host->map_run(low, kPage, pages));
  CHECK_THROWS(kInvalidArgument, host->map_run(low + kPage, kPage, {pages[0], pages[1]}));
  CHECK_THROWS(kInvalidArgument, host->map(low + 2 * kPage, kPage, pages[0]));
  CHECK_THROWS(kInvalidArgument, host->map(low - kPage, kPage, pages[0]));
  host->map(low + kPage, kPage, pages[0]);
  CHECK_THROWS(kInvalidArgument, host->map_run(low, kPage, {pages[1], pages[2]}));
  host->map(low, kPage, pages[1]);
  CHECK_THROWS(kPageMapped, host->release(low, 2 * kPage));
  for (const Address at : {low, low + kPage}) host->unmap(at, kPage);
  host->release(low, 2 * kPage);
}

TEST(reservations_are_aligned_and_disjoint) {
  const BackendPtr host = open_host_pages(1);
  const std::size_t alignment = 64 * kPage;
  const Address first = host->reserve(3 * kPage, alignment);
  const Address second = host->reserve(3 * kPage, alignment);
  CHECK_EQ(first % alignment, std::size_t{0});
  CHECK_EQ(second % alignment, std::size_t{0});
  CHECK(first + 3 * kPage <= second || second + 3 * kPage <= first);
  CHECK_THROWS(kInvalidArgument, host->reserve(kPage, 3 * kPage));
  host->release(first, 3 * kPage);
  host->release(second, 3 * kPage);
}

TEST(reading_what_is_not_mapped_ends_the_process) {
  const BackendPtr host = open_host_pages(2);
  const Address address = host->reserve(2 * kPage, kPage);
  const Handle page = host->create(kPage);
  CHECK_EQ(signal_of_reading(address), SIGSEGV);
  host->map(address, kPage, page);
  CHECK_EQ(signal_of_reading(address), 0);
  CHECK_EQ(signal_of_reading(address + kPage), SIGSEGV);
  host->unmap(address, kPage);
  CHECK_EQ(signal_of_reading(address), SIGSEGV);
}

TEST(a_closed_backend_leaves_no_descriptor_and_no_address) {
  const std::size_t num_fds = count_fds();
  Address reserved = 0;
  {
    const BackendPtr host = open_host_pages(4);
    reserved = host->reserve(kPage, kPage);
    host->map(reserved, kPage, host->create(kPage));
  }
  CHECK_EQ(count_fds(), num_fds);
  unsigned char resident[kPage / 4096];
  CHECK(mincore(bytes_at(reserved), kPage, resident) != 0 && errno == ENOMEM);
}

#ifndef __SANITIZE_ADDRESS__  // a sanitizer needs mappings of its own
namespace {

// Uses up the process's mappings, and gives them back.
class TooManyMappings {
 public:
  TooManyMappings()
      : bytes_(mmap(nullptr, kNumBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                    0)) {
    auto* at = static_cast<std::uint8_t*>(bytes_);
    for (std::size_t i = 0; i < kNumBytes && !mprotect(at + i, 4096, PROT_READ); i += 2 * 4096) {
    }
  }
  ~TooManyMappings() { munmap(bytes_, kNumBytes); }

 private:
  static constexpr std::size_t kNumBytes = std::size_t{1} << 30;
  void* bytes_;
};

}  // namespace

TEST(too_many_mappings_is_exhaustion_and_changes_nothing) {
  const auto pool = make_pool(open_host_pages(64));
  VirtualTensor tensor(pool, 16, kPage + kPage / 2);
  tensor.map_slots(2, 9);
  for (std::size_t slot = 2; slot < 11; ++slot) fill_slot(tensor, slot, slot);
  const auto refs = tensor.page_refs();
  {
    const TooManyMappings used_up;
    CHECK_THROWS(kExhausted, tensor.map_slots(13, 2));
    CHECK(tensor.page_refs() == refs);
    CHECK_THROWS(kExhausted, tensor.unmap_slots(5, 3));  // its pages stay, idle
  }
  tensor.check_integrity();
  CHECK(!tensor.is_mapped(5) && !tensor.is_mapped(6) && !tensor.is_mapped(7));
  tensor.unmap_slots(5, 3);
  for (const std::size_t slot : {2, 3, 4, 8, 9, 10}) CHECK(slot_holds(tensor, slot, slot));
  CHECK_EQ(signal_of_reading(tensor.address() + 6 * tensor.slot_bytes()), SIGSEGV);
  tensor.map_slots(5, 3);
  tensor.map_slots(13, 2);
  CHECK_EQ(pool->state().num_used, tensor.state().num_pages);
}
#endif
