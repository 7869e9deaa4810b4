// virtual_tensor.cpp over every backend: which pages lie behind which slots, and what they hold.
#include <numeric>

#include "dlpack.h"
#include "tests/support.h"

using namespace support;

namespace {

constexpr std::size_t kHalf = kPage / 2;
constexpr std::size_t kFiveAndAHalf = 5 * kPage + kHalf;  // w13 of DeepSeek-V2-Lite, in pages

void fill(const VirtualTensor& tensor, std::size_t first, std::size_t count) {
  for (std::size_t slot = first; slot < first + count; ++slot) fill_slot(tensor, slot, slot + 1);
}

bool holds(const VirtualTensor& tensor, std::size_t first, std::size_t count) {
  for (std::size_t slot = first; slot < first + count; ++slot) {
    if (!slot_holds(tensor, slot, slot + 1)) return false;
  }
  return true;
}

using Refs = std::vector<std::uint32_t>;

}  // namespace

TEST(unmapping_one_slot_keeps_its_neighbours_half_page) {
  for_each_backend([](const BackendPtr& backend) {
    const auto pool = make_pool(backend);
    VirtualTensor tensor(pool, 3, kFiveAndAHalf);
    tensor.map_slots(0, 3);
    fill(tensor, 0, 3);
    CHECK_EQ(pool->state().num_used, std::size_t{17});
    tensor.unmap_slots(1, 1);  // [5.5, 11) pages: page 5 is shared with slot 0, 10 is its own
    CHECK_EQ(pool->state().num_used, std::size_t{12});
    CHECK(holds(tensor, 0, 1) && holds(tensor, 2, 1));
    CHECK_EQ(signal_of_reading(tensor.address() + 5 * kPage + kHalf), 0);  // the shared page
    CHECK_EQ(signal_of_reading(tensor.address() + 6 * kPage), SIGSEGV);
    tensor.unmap_slots(0, 1);
    CHECK_EQ(pool->state().num_used, std::size_t{6});
    CHECK(holds(tensor, 2, 1));
    tensor.check_integrity();
  });
}

TEST(pages_are_referred_to_by_the_mapped_slots_that_lie_on_them) {
  for_each_backend([](const BackendPtr& backend) {
    VirtualTensor tensor(make_pool(backend), 4, kPage + kHalf);
    CHECK_EQ(tensor.state().reserved_bytes, 6 * kPage);
    tensor.map_slots(0, 2);
    CHECK(tensor.page_refs() == Refs{1, 2, 1, 0, 0, 0});
    CHECK_EQ(tensor.num_missing_pages(2, 1), std::size_t{2});
    tensor.map_slots(3, 1);
    CHECK(tensor.page_refs() == Refs{1, 2, 1, 0, 1, 1});
    CHECK_EQ(tensor.num_missing_pages(2, 1), std::size_t{1});  // its second page is there
    CHECK_EQ(tensor.state().num_shared_pages, std::size_t{1});
    CHECK_EQ(tensor.state().num_mapped_slots, std::size_t{3});
    CHECK(tensor.mapped_slots() == std::vector<bool>{true, true, false, true});
    tensor.unmap_slots(0, 4);
    CHECK(tensor.page_refs() == Refs(6, 0));
    CHECK_EQ(tensor.state().num_pages, std::size_t{0});
  });
}

TEST(page_handles_are_those_that_mapped_slots_lie_on) {
  for_each_vendor([](const Vendor& vendor) {
    VirtualTensor tensor(make_pool(vendor.open()), 4, kPage + kHalf);
    CHECK_EQ(tensor.page_bytes(), kPage);
    tensor.map_slots(1, 1);
    const auto are_there = [&](const std::vector<bool>& wanted) {
      const auto handles = tensor.page_handles();
      for (std::size_t page = 0; page < wanted.size(); ++page) {
        CHECK_EQ(handles[page].has_value(), bool{wanted[page]});
      }
      return handles.size() == wanted.size();
    };
    CHECK(are_there({false, true, true, false, false, false}));
    CHECK(!(*tensor.page_handles()[1] == *tensor.page_handles()[2]));
    vendor.fail(vendor.unmap, 1, vendor.broken);
    CHECK_THROWS(kVendorCall, tensor.unmap_slots(1, 1));
    CHECK_EQ(tensor.state().num_pages, std::size_t{1});  // idle: nobody is to map it
    CHECK(are_there(std::vector<bool>(6, false)));
  });
}

TEST(many_slots_a_page_share_it) {
  for_each_backend([](const BackendPtr& backend) {
    const auto pool = make_pool(backend);
    VirtualTensor tensor(pool, 300, kPage / 64 - 3);  // 300 of them are 4.7 pages
    tensor.map_slots(0, 300);
    fill(tensor, 0, 300);
    CHECK_EQ(pool->state().num_used, std::size_t{5});
    for (std::size_t slot = 0; slot < 300; slot += 2) tensor.unmap_slots(slot, 1);
    CHECK_EQ(pool->state().num_used, std::size_t{5});
    for (std::size_t slot = 1; slot < 300; slot += 2) CHECK(holds(tensor, slot, 1));
    tensor.check_integrity();
  });
}

TEST(mapping_beside_a_mapped_slot_keeps_its_contents) {
  for_each_backend([](const BackendPtr& backend) {
    VirtualTensor tensor(make_pool(backend), 3, 2 * kPage + 3 * kPage / 4);
    tensor.map_slots(1, 1);
    fill(tensor, 1, 1);
    tensor.map_slots(0, 1);
    tensor.map_slots(2, 1);
    CHECK(holds(tensor, 1, 1));
    fill(tensor, 0, 3);
    CHECK(holds(tensor, 0, 3));
  });
}

TEST(unmapping_is_idempotent_and_passes_over_what_is_not_mapped) {
  for_each_backend([](const BackendPtr& backend) {
    const auto pool = make_pool(backend);
    VirtualTensor tensor(pool, 4, kFiveAndAHalf);
    tensor.unmap_slots(0, 4);
    tensor.map_slots(1, 1);
    tensor.unmap_slots(0, 4);
    tensor.unmap_slots(0, 4);
    tensor.unmap_slots(1, 0);
    CHECK_EQ(pool->state().num_used, std::size_t{0});
    tensor.check_integrity();
  });
}

TEST(mapping_a_mapped_slot_is_refused_and_changes_nothing) {
  for_each_backend([](const BackendPtr& backend) {
    const auto pool = make_pool(backend);
    VirtualTensor tensor(pool, 4, kFiveAndAHalf);
    tensor.map_slots(2, 1);
    fill(tensor, 2, 1);
    const Refs refs = tensor.page_refs();
    CHECK_THROWS(kSlotMapped, tensor.map_slots(2, 1));
    CHECK_THROWS(kSlotMapped, tensor.map_slots(0, 4));
    CHECK(tensor.page_refs() == refs);
    CHECK_EQ(pool->state().num_used, std::size_t{6});
    CHECK(holds(tensor, 2, 1));
  });
}

TEST(slots_that_are_not_there_are_refused) {
  const auto pool = make_pool(open_host_pages(16));
  VirtualTensor tensor(pool, 4, kHalf);
  CHECK_THROWS(kInvalidArgument, tensor.map_slots(4, 1));
  CHECK_THROWS(kInvalidArgument, tensor.map_slots(3, 2));
  CHECK_THROWS(kInvalidArgument, tensor.map_slots(1, kNoLimit));
  CHECK_THROWS(kInvalidArgument, tensor.unmap_slots(5, 0));
  CHECK_THROWS(kInvalidArgument, tensor.is_mapped(4));
  CHECK_THROWS(kInvalidArgument, tensor.num_missing_pages(0, 5));
  tensor.map_slots(4, 0);
  CHECK_THROWS(kInvalidArgument, VirtualTensor(pool, 0, kHalf));
  CHECK_THROWS(kInvalidArgument, VirtualTensor(pool, 4, 0));
  CHECK_THROWS(kInvalidArgument, VirtualTensor(pool, kNoLimit / 2, 4));
}

TEST(a_map_beyond_the_budget_changes_nothing_for_every_budget) {
  for_each_backend([](const BackendPtr& backend) {
    // Slots 1 and 4 are mapped (12 pages), so 0 to 5 less those need 21 more, in three runs.
    for (std::size_t max_pages = 12; max_pages < 33; ++max_pages) {
      const auto pool = make_pool(backend, budget(max_pages));
      VirtualTensor tensor(pool, 6, kFiveAndAHalf);
      tensor.map_slots(1, 1);
      tensor.map_slots(4, 1);
      fill(tensor, 1, 1);
      fill(tensor, 4, 1);
      const Refs refs = tensor.page_refs();
      CHECK_EQ(pool->state().num_used, std::size_t{12});
      // Two slots together, where one alone would fit.
      const std::size_t needed = tensor.num_missing_pages(2, 2);
      if (needed > max_pages - 12) {
        CHECK_THROWS(kExhausted, tensor.map_slots(2, 2));
        CHECK(tensor.page_refs() == refs);
        CHECK_EQ(pool->state().num_pages, std::size_t{12});
      } else {
        tensor.map_slots(2, 2);
        CHECK_EQ(pool->state().num_used, 12 + needed);
      }
      CHECK(holds(tensor, 1, 1) && holds(tensor, 4, 1));
      tensor.check_integrity();
      pool->check_integrity();
    }
  });
}

TEST(several_tensors_share_a_pool) {
  for_each_backend([](const BackendPtr& backend) {
    const auto pool = make_pool(backend, budget(20));
    VirtualTensor first(pool, 2, kFiveAndAHalf);
    VirtualTensor second(pool, 4, 2 * kPage + 3 * kPage / 4);
    first.map_slots(0, 2);
    second.map_slots(0, 3);
    fill(first, 0, 2);
    fill(second, 0, 3);
    CHECK_EQ(pool->state().num_used, std::size_t{20});
    CHECK_EQ(second.num_missing_pages(3, 1), std::size_t{2});
    CHECK_THROWS(kExhausted, second.map_slots(3, 1));
    first.unmap_slots(1, 1);
    second.map_slots(3, 1);
    fill(second, 3, 1);
    CHECK(holds(first, 0, 1) && holds(second, 0, 4));
  });
}

TEST(a_tensor_that_ends_gives_back_pages_and_addresses) {
  for_each_vendor([](const Vendor& vendor) {
    const auto pool = make_pool(vendor.open());
    {
      VirtualTensor tensor(pool, 4, kFiveAndAHalf);
      tensor.map_slots(1, 3);
      CHECK_EQ(vendor.live_mappings(), tensor.state().num_pages);
      CHECK_EQ(vendor.live_reservations(), std::size_t{1});
    }
    CHECK_EQ(vendor.live_mappings(), std::size_t{0});
    CHECK_EQ(vendor.live_reservations(), std::size_t{0});
    CHECK_EQ(pool->state().num_used, std::size_t{0});
  });
}

TEST(pages_may_be_larger_than_the_granularity) {
  for_each_vendor([](const Vendor& vendor) {
    const auto pool = std::make_shared<PagePool>(vendor.open(), 3 * kPage, PoolLimits{});
    VirtualTensor tensor(pool, 4, 4 * kPage);
    tensor.map_slots(0, 2);
    fill(tensor, 0, 2);
    CHECK_EQ(pool->state().num_used, std::size_t{3});
    tensor.unmap_slots(0, 1);
    CHECK(holds(tensor, 1, 1));
    CHECK_EQ(tensor.state().num_pages, std::size_t{2});
  });
}

TEST(a_dlpack_tensor_keeps_its_memory) {
  const auto pool = make_pool(open_host_pages(16));
  auto tensor = std::make_shared<VirtualTensor>(pool, 4, 6 * 1024);
  tensor->map_slots(0, 4);
  CHECK_THROWS(kInvalidArgument, make_dlpack(tensor, {4, 1024}, "bfloat16"));
  CHECK_THROWS(kInvalidArgument, make_dlpack(tensor, {2, 6144}, "bfloat16"));
  CHECK_THROWS(kInvalidArgument, make_dlpack(tensor, {4, 3072}, "uint16"));
  CHECK_THROWS(kInvalidArgument, make_dlpack(tensor, {4, 3072}, "int8"));
  delete_dlpack(make_dlpack(tensor, {4, 3072}, "int16"));
  CHECK_THROWS(kInvalidArgument, make_dlpack(tensor, {}, "float32"));
  CHECK_THROWS(kInvalidArgument, make_dlpack(tensor, {4, -3072}, "float16"));
  CHECK_THROWS(kInvalidArgument, make_dlpack(tensor, {4, 0}, "float16"));
  CHECK_THROWS(kInvalidArgument,
               make_dlpack(tensor, {4, std::int64_t{1} << 62, std::int64_t{1} << 62}, "float16"));
  DlpackTensor* made = make_dlpack(tensor, {4, 3, 512}, "float32");
  const std::weak_ptr<VirtualTensor> watched = tensor;
  tensor.reset();
  CHECK(!watched.expired());
  CHECK_EQ(pool->state().num_used, std::size_t{1});
  delete_dlpack(made);
  CHECK(watched.expired());
  CHECK_EQ(pool->state().num_used, std::size_t{0});
}
