// page_pool.cpp: what is handed out, kept, destroyed and counted.
#include <thread>

#include "tests/support.h"

using namespace support;

TEST(hands_out_lowest_ids_first_and_creates_what_is_missing) {
  const auto pool = make_pool(open_host_pages(8));
  CHECK(pool->take(3) == std::vector<PageId>{0, 1, 2});
  pool->give_back({1});
  CHECK(pool->take(2) == std::vector<PageId>{1, 3});
  const PoolState state = pool->state();
  CHECK_EQ(state.num_pages, std::size_t{4});
  CHECK_EQ(state.num_used, std::size_t{4});
  CHECK_EQ(state.peak_used, std::size_t{4});
  CHECK_EQ(state.num_created, std::size_t{4});
  pool->check_integrity();
}

TEST(budget_bounds_free_and_used_pages_together) {
  const auto pool = make_pool(open_host_pages(8), budget(4));
  const auto taken = pool->take(3);
  CHECK_THROWS(kExhausted, pool->take(2));
  CHECK_EQ(pool->state().num_pages, std::size_t{3});  // nothing was made on the way
  pool->give_back(taken);
  CHECK_EQ(pool->take(4).size(), std::size_t{4});
  CHECK_THROWS(kExhausted, pool->take(1));
  CHECK(pool->take(0).empty());
  pool->check_integrity();
}

TEST(set_max_pages_moves_the_budget_but_not_below_what_exists) {
  const auto pool = make_pool(open_host_pages(8), budget(2));
  pool->take(2);
  CHECK_THROWS(kExhausted, pool->take(1));
  CHECK_THROWS(kInvalidArgument, pool->set_max_pages(1));
  pool->set_max_pages(3);
  CHECK_EQ(pool->take(1).size(), std::size_t{1});
  CHECK_EQ(pool->state().max_pages, std::size_t{3});
  pool->check_integrity();
}

TEST(water_marks_keep_a_few_and_destroy_the_rest) {
  PoolLimits limits;
  limits.min_free_pages = 2;
  limits.max_free_pages = 3;
  const auto pool = make_pool(open_host_pages(16), limits);
  CHECK_EQ(pool->state().num_free, std::size_t{2});
  const auto taken = pool->take(6);
  pool->give_back(taken);
  CHECK_EQ(pool->state().num_free, std::size_t{3});
  CHECK_EQ(pool->state().num_destroyed, std::size_t{3});
  pool->trim(0);
  CHECK_EQ(pool->state().num_free, std::size_t{2});
  CHECK_EQ(pool->backend().resident_bytes().value(), 2 * kPage);
  pool->check_integrity();
}

TEST(limits_that_contradict_each_other_are_refused) {
  PoolLimits limits;
  limits.min_free_pages = 3;
  limits.max_free_pages = 2;
  CHECK_THROWS(kInvalidArgument, make_pool(open_host_pages(8), limits));
  limits.max_free_pages = kNoLimit;
  limits.max_pages = 2;
  CHECK_THROWS(kExhausted, make_pool(open_host_pages(8), limits));
  CHECK_THROWS(kBadGranularity, PagePool(open_host_pages(8), kPage + 4096, {}));
  CHECK_THROWS(kBadGranularity, PagePool(open_host_pages(8), 0, {}));
}

TEST(trim_destroys_the_highest_ids_and_those_ids_come_back) {
  const auto pool = make_pool(open_host_pages(8));
  pool->preallocate(5);
  pool->trim(2);
  CHECK_EQ(pool->state().num_pages, std::size_t{2});
  CHECK_THROWS(kInvalidArgument, pool->handle(4));
  CHECK(pool->take(3) == std::vector<PageId>{0, 1, 2});
  pool->trim(0);
  CHECK_EQ(pool->state().num_used, std::size_t{3});
  pool->check_integrity();
}

TEST(preallocate_is_all_or_nothing) {
  const auto pool = make_pool(open_host_pages(4));
  pool->preallocate(2);
  CHECK_THROWS(kExhausted, pool->preallocate(5));  // the device has four
  CHECK_EQ(pool->state().num_free, std::size_t{2});
  CHECK_EQ(pool->backend().resident_bytes().value(), 2 * kPage);
  pool->preallocate(1);  // has them already
  CHECK_EQ(pool->state().num_free, std::size_t{2});
  pool->preallocate(4);
  CHECK_EQ(pool->state().num_free, std::size_t{4});
  pool->check_integrity();
}

TEST(what_was_not_handed_out_is_not_taken_back) {
  const auto pool = make_pool(open_host_pages(8));
  const auto taken = pool->take(3);
  pool->give_back({taken[2]});
  CHECK_THROWS(kInvalidArgument, pool->give_back({taken[0], taken[2]}));  // free already
  CHECK_THROWS(kInvalidArgument, pool->give_back({taken[0], taken[0]}));  // twice
  CHECK_THROWS(kInvalidArgument, pool->give_back({taken[0], 99}));        // no such page
  CHECK_EQ(pool->state().num_used, std::size_t{2});  // each refusal came before anything happened
  pool->give_back({});
  pool->give_back({taken[1], taken[0]});
  CHECK_EQ(pool->state().num_used, std::size_t{0});
  pool->check_integrity();
}

TEST(a_mapped_page_is_never_destroyed) {
  const BackendPtr host = open_host_pages(4);
  PoolLimits limits;
  limits.max_free_pages = 0;  // whatever comes back is destroyed
  const auto pool = make_pool(host, limits);
  const auto taken = pool->take(1);
  const Handle handle = pool->handle(taken[0]);
  const Address address = host->reserve(kPage, kPage);
  host->map(address, kPage, handle);
  CHECK_THROWS(kPageMapped, host->destroy(handle));
  pool->give_back(taken);  // the device refuses, so the page stays, free
  CHECK_EQ(pool->state().num_free, std::size_t{1});
  host->unmap(address, kPage);
  pool->trim(0);
  CHECK_EQ(pool->state().num_pages, std::size_t{0});
  pool->check_integrity();
}

TEST(destruction_gives_every_page_back) {
  for_each_vendor([](const Vendor& vendor) {
    const BackendPtr backend = vendor.open();
    {
      const auto pool = make_pool(backend);
      pool->preallocate(5);
      pool->take(3);
      CHECK_EQ(vendor.live_handles(), std::size_t{5});
    }
    CHECK_EQ(vendor.live_handles(), std::size_t{0});
  });
}

TEST(a_failed_creation_gives_back_what_was_made_for_every_n) {
  for_each_vendor([](const Vendor& vendor) {
    const auto pool = make_pool(vendor.open());
    const auto used = pool->take(2);
    pool->preallocate(3);
    for (int nth = 1; nth <= 4; ++nth) {
      vendor.fail(vendor.create, nth, vendor.out_of_memory);
      CHECK_THROWS(kExhausted, pool->take(7));
      CHECK_EQ(pool->state().num_free, std::size_t{3});
      CHECK_EQ(pool->state().num_used, std::size_t{2});
      CHECK_EQ(vendor.live_handles(), std::size_t{5});
      pool->check_integrity();
    }
    vendor.set_memory(8 * kPage);  // five exist
    CHECK_THROWS(kExhausted, pool->preallocate(7));
    CHECK_EQ(vendor.live_handles(), std::size_t{5});
    pool->preallocate(6);
    pool->give_back(used);
  });
}

TEST(a_failed_destruction_leaves_the_page_free) {
  for_each_vendor([](const Vendor& vendor) {
    PoolLimits limits;
    limits.max_free_pages = 0;
    const auto pool = make_pool(vendor.open(), limits);
    const auto taken = pool->take(2);
    vendor.fail(vendor.destroy, 1, vendor.broken);
    pool->give_back(taken);
    CHECK_EQ(pool->state().num_free, std::size_t{2});
    vendor.fail(vendor.destroy, 2, vendor.broken);
    CHECK_THROWS(kVendorCall, pool->trim(0));
    CHECK_EQ(pool->state().num_free, std::size_t{1});
    pool->check_integrity();
    CHECK_EQ(pool->take(2).size(), std::size_t{2});
    CHECK_EQ(vendor.live_handles(), std::size_t{2});
  });
}

TEST(threads_share_a_pool) {
  const auto pool = make_pool(open_host_pages(64), budget(48));
  std::vector<std::thread> threads;
  for (std::size_t seed = 1; seed <= 4; ++seed) {
    threads.emplace_back([&pool, seed] {
      for (std::size_t round = 0; round < 300; ++round) {
        pool->give_back(pool->take(1 + (round * seed) % 12));
        if (round % 50 == 0) pool->trim(seed);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(pool->state().num_used, std::size_t{0});
  pool->check_integrity();
}
