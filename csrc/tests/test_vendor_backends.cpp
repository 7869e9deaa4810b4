// vmm/cuda.cpp and vmm/acl.cpp over their simulators: refusals, failures of each call, rollback.
#include <fcntl.h>

#include <optional>
#include <thread>

#include "tests/support.h"

using namespace support;

namespace {

constexpr std::size_t kSlotBytes = 2 * kPage + 3 * kPage / 4;
constexpr std::size_t kNumSlots = 12;

// A tensor with some slots mapped. Idle pages among the others, left behind by a failure, make
// mapping those take several runs.
struct World {
  explicit World(const Vendor& vendor_, bool has_idle_pages = false)
      : vendor(vendor_), pool(make_pool(vendor.open())), tensor(pool, kNumSlots, kSlotBytes) {
    for (const std::size_t slot : {1, 6, 11}) {
      tensor.map_slots(slot, 1);
      fill_slot(tensor, slot, slot);
    }
    if (has_idle_pages) leave_idle_pages();
    pool->preallocate(4);
    pool->trim(4);
    before = snapshot();
  }

  void leave_idle_pages() {
    tensor.map_slots(2, 4);
    for (const int nth : {2, 5, 6}) vendor.fail(vendor.unmap, nth, vendor.broken);
    CHECK_THROWS(kVendorCall, tensor.unmap_slots(2, 4));
  }

  struct Snapshot {
    std::vector<std::uint32_t> refs;
    std::vector<bool> mapped;
    std::size_t num_pages;
  };

  Snapshot snapshot() const {
    return {tensor.page_refs(), tensor.mapped_slots(), tensor.state().num_pages};
  }

  void check_books() const {
    tensor.check_integrity();
    pool->check_integrity();
    CHECK_EQ(vendor.live_mappings(), tensor.state().num_pages);
    CHECK_EQ(vendor.live_handles(), pool->state().num_pages);
    CHECK_EQ(pool->state().num_used, tensor.state().num_pages);
    for (const std::size_t slot : {1, 6, 11}) {
      if (tensor.is_mapped(slot)) CHECK(slot_holds(tensor, slot, slot));
    }
  }

  // Everything is as it was before; the pages that were made stay in the pool.
  void check_unchanged() const {
    check_books();
    const Snapshot now = snapshot();
    CHECK(now.refs == before.refs && now.mapped == before.mapped);
    CHECK_EQ(now.num_pages, before.num_pages);
  }

  const Vendor& vendor;
  const std::shared_ptr<PagePool> pool;
  VirtualTensor tensor;
  Snapshot before;
};

// Of reading each part of it, in a process that may die of that.
int signal_of_reading_slot(const World& world, std::size_t slot) {
  int found = 0;
  for (Address at = world.tensor.address() + slot * kSlotBytes;
       !found && at < world.tensor.address() + (slot + 1) * kSlotBytes; at += kPage / 4) {
    found = signal_of_reading(at);
  }
  return found;
}

// Maps slots [2, 6), 10 pages, with the n-th call of `call` failing; false when n is too high.
bool map_with_failure(World& world, const char* call, int nth, ErrorKind kind, int code) {
  world.vendor.fail(call, nth, code);
  try {
    world.tensor.map_slots(2, 4);
    return false;
  } catch (const VmmError& error) {
    CHECK(error.kind == kind);
    CHECK(error.call == call && error.code == code && error.backend == world.vendor.name);
  }
  world.check_unchanged();
  world.tensor.map_slots(2, 4);  // the same call again works
  world.check_books();
  return true;
}

}  // namespace

TEST(rolls_back_when_the_nth_call_fails_for_every_n) {
  for_each_vendor([](const Vendor& vendor) {
    struct Case {
      const char* call;
      bool has_idle_pages;
      int num_calls;  // that mapping slots [2, 6) takes
    };
    for (const Case& each : {Case{vendor.create, false, 6}, Case{vendor.create, true, 3},
                             Case{vendor.map, false, 10}, Case{vendor.map, true, 7},
                             Case{vendor.set_access, false, 1}, Case{vendor.set_access, true, 5}}) {
      if (!*each.call) continue;
      for (int nth = 1; nth <= each.num_calls + 1; ++nth) {
        vendor.reset();
        World world(vendor, each.has_idle_pages);
        CHECK_EQ(map_with_failure(world, each.call, nth, ErrorKind::kExhausted,
                                  vendor.out_of_memory),
                 nth <= each.num_calls);
      }
    }
  });
}

TEST(a_vendors_own_failure_is_told_as_such) {
  for_each_vendor([](const Vendor& vendor) {
    World world(vendor);
    CHECK(map_with_failure(world, vendor.map, 2, ErrorKind::kVendorCall, vendor.broken));
  });
}

TEST(a_rollback_that_fails_too_loses_no_page_for_every_n_and_m) {
  for_each_vendor([](const Vendor& vendor) {
    for (int nth = 2; nth <= 10; ++nth) {
      for (int failed_unmap = 1; failed_unmap < nth; ++failed_unmap) {
        vendor.reset();
        World world(vendor);
        vendor.fail(vendor.map, nth, vendor.out_of_memory);
        vendor.fail(vendor.unmap, failed_unmap, vendor.broken);
        vendor.fail(vendor.unmap, nth, vendor.broken);  // the second try
        CHECK_THROWS(kExhausted, world.tensor.map_slots(2, 4));  // the first failure is told
        CHECK(world.tensor.page_refs() == world.before.refs);
        CHECK_EQ(world.tensor.state().num_pages, world.before.num_pages + 1);
        world.check_books();  // the page that could not be unmapped is idle, and this tensor's
        world.tensor.unmap_slots(2, 4);
        world.check_unchanged();
        world.tensor.map_slots(2, 4);
        world.check_books();
      }
    }
  });
}

TEST(a_map_that_meets_idle_pages_uses_them) {
  for_each_vendor([](const Vendor& vendor) {
    World world(vendor);
    world.tensor.map_slots(2, 4);
    vendor.fail(vendor.unmap, 2, vendor.broken);
    vendor.fail(vendor.unmap, 4, vendor.broken);
    CHECK_THROWS(kVendorCall, world.tensor.unmap_slots(2, 4));
    CHECK(world.tensor.page_refs() == world.before.refs);
    CHECK_EQ(world.tensor.state().num_pages, world.before.num_pages + 2);
    world.check_books();
    const int num_maps = vendor.count(vendor.map);
    const std::size_t num_missing = world.tensor.num_missing_pages(2, 4);
    world.tensor.map_slots(2, 4);
    CHECK_EQ(static_cast<std::size_t>(vendor.count(vendor.map) - num_maps), num_missing);
    world.check_books();
    world.tensor.unmap_slots(2, 4);
    world.check_unchanged();
  });
}

// A page that stayed mapped when its run failed never got access, or may have lost it.
TEST(idle_pages_of_a_failed_map_can_be_written_once_they_are_mapped) {
  for_each_vendor([](const Vendor& vendor) {
    World world(vendor);
    vendor.fail(vendor.map, 10, vendor.out_of_memory);
    for (const int nth : {3, 6, 7, 10, 11, 12}) vendor.fail(vendor.unmap, nth, vendor.broken);
    CHECK_THROWS(kExhausted, world.tensor.map_slots(2, 4));
    CHECK_EQ(world.tensor.state().num_pages, world.before.num_pages + 3);
    world.before = world.snapshot();
    if (*vendor.set_access) {
      vendor.fail(vendor.set_access, 2, vendor.broken);
      CHECK_THROWS(kVendorCall, world.tensor.map_slots(2, 4));
      world.check_unchanged();
    }
    world.tensor.map_slots(2, 4);
    for (std::size_t slot = 2; slot < 6; ++slot) CHECK_EQ(signal_of_reading_slot(world, slot), 0);
    world.check_books();
  });
}

TEST(a_failed_unmap_leaves_its_page_idle_and_is_tried_again_for_every_n) {
  for_each_vendor([](const Vendor& vendor) {
    for (int nth = 1; nth <= 9; ++nth) {
      vendor.reset();
      World world(vendor);
      world.tensor.map_slots(2, 4);
      vendor.fail(vendor.unmap, nth, vendor.broken);
      CHECK_THROWS(kVendorCall, world.tensor.unmap_slots(2, 4));
      CHECK(world.tensor.page_refs() == world.before.refs);  // unmapped all the same
      CHECK_EQ(world.tensor.state().num_pages, world.before.num_pages + 1);
      world.check_books();
      world.tensor.unmap_slots(2, 4);
      world.check_unchanged();
    }
  });
}

TEST(a_failed_unmap_in_a_destructor_is_survived) {
  for_each_vendor([](const Vendor& vendor) {
    {
      World world(vendor);
      vendor.fail(vendor.unmap, 2, vendor.broken);
    }
    vendor.reset();
    World world(vendor);  // and the next one works
    world.check_books();
  });
}

TEST(one_handle_at_two_addresses_is_one_memory_in_either_order_of_unmapping) {
  for_each_vendor([](const Vendor& vendor) {
    const BackendPtr backend = vendor.open();
    for (const int unmapped_first : {0, 1}) {
      const Handle page = backend->create(kPage);
      const Address at[] = {backend->reserve(kPage, kPage), backend->reserve(kPage, kPage)};
      for (const Address address : at) {
        backend->map(address, kPage, page);
        backend->set_access(address, kPage);
      }
      const Address kept = at[1 - unmapped_first];
      std::memcpy(bytes_at(at[0]), pattern(1, kPage), kPage);
      backend->unmap(at[unmapped_first], kPage);
      CHECK_EQ(signal_of_reading(at[unmapped_first]), SIGSEGV);
      CHECK(!std::memcmp(bytes_at(kept), pattern(1, kPage), kPage));
      CHECK_THROWS(kPageMapped, backend->destroy(page));
      backend->unmap(kept, kPage);
      backend->destroy(page);
      CHECK_THROWS(kInvalidArgument, backend->destroy(page));
    }
    CHECK_EQ(vendor.live_handles(), std::size_t{0});
  });
}

// The same refusals on every backend, before any vendor's call.
TEST(mistakes_are_refused_alike_everywhere) {
  for_each_backend([](const BackendPtr& backend) {
    CHECK_THROWS(kInvalidArgument, backend->create(kPage / 2));
    CHECK_THROWS(kInvalidArgument, backend->create(0));
    CHECK_THROWS(kInvalidArgument, backend->reserve(0, kPage));
    CHECK_THROWS(kInvalidArgument, backend->reserve(kPage + 1, kPage));
    CHECK_THROWS(kInvalidArgument, backend->destroy(Handle{12345}));
    CHECK_THROWS(kInvalidArgument, backend->export_handle(Handle{12345}));
    const Handle page = backend->create(kPage);
    const Handle other = backend->create(kPage);
    const Address address = backend->reserve(2 * kPage, kPage);
    CHECK_THROWS(kInvalidArgument, backend->map(address + 1, kPage, page));
    CHECK_THROWS(kInvalidArgument, backend->map(address + kPage / 2, kPage, page));
    CHECK_THROWS(kInvalidArgument, backend->map(address, 2 * kPage, page));
    CHECK_THROWS(kInvalidArgument, backend->map(address + 2 * kPage, kPage, page));
    CHECK_THROWS(kInvalidArgument, backend->map(address, kPage, Handle{12345}));
    CHECK_THROWS(kInvalidArgument, backend->unmap(address, kPage));
    CHECK_THROWS(kInvalidArgument, backend->set_access(address, kPage));
    CHECK_THROWS(kInvalidArgument, backend->release(address, kPage));
    CHECK_THROWS(kInvalidArgument, backend->release(address + kPage, kPage));
    backend->map(address, kPage, page);
    CHECK_THROWS(kInvalidArgument, backend->map(address, kPage, other));
    CHECK_THROWS(kInvalidArgument, backend->map_run(address, kPage, {other, other}));
    CHECK_THROWS(kInvalidArgument, backend->set_access(address, 2 * kPage));
    CHECK_THROWS(kInvalidArgument, backend->unmap(address, 2 * kPage));
    CHECK_THROWS(kPageMapped, backend->destroy(page));
    CHECK_THROWS(kPageMapped, backend->release(address, 2 * kPage));
    backend->unmap(address, kPage);
    CHECK_THROWS(kInvalidArgument, backend->unmap(address, kPage));
    backend->destroy(page);
    backend->destroy(other);
    backend->release(address, 2 * kPage);
    CHECK_THROWS(kInvalidArgument, backend->map(address, kPage, backend->create(kPage)));
  });
}

TEST(each_call_that_fails_throws_and_changes_nothing) {
  for_each_vendor([](const Vendor& vendor) {
    const BackendPtr backend = vendor.open();
    vendor.fail(vendor.reserve, 1, vendor.out_of_memory);
    CHECK_THROWS(kExhausted, backend->reserve(kPage, kPage));
    CHECK_EQ(vendor.live_reservations(), std::size_t{0});
    const Address address = backend->reserve(kPage, kPage);
    vendor.fail(vendor.create, 1, vendor.broken);
    CHECK_THROWS(kVendorCall, backend->create(kPage));
    const Handle page = backend->create(kPage);
    vendor.fail(vendor.map, 1, vendor.broken);
    CHECK_THROWS(kVendorCall, backend->map(address, kPage, page));
    backend->map(address, kPage, page);
    vendor.fail(vendor.unmap, 1, vendor.broken);
    CHECK_THROWS(kVendorCall, backend->unmap(address, kPage));
    backend->unmap(address, kPage);
    vendor.fail(vendor.release, 1, vendor.broken);
    CHECK_THROWS(kVendorCall, backend->release(address, kPage));
    backend->release(address, kPage);
    vendor.fail(vendor.destroy, 1, vendor.broken);
    CHECK_THROWS(kVendorCall, backend->destroy(page));
    backend->destroy(page);
  });
}

TEST(a_closed_backend_gives_everything_back) {
  for_each_vendor([](const Vendor& vendor) {
    const std::size_t num_fds = count_fds();
    {
      const BackendPtr backend = vendor.open();
      const Address address = backend->reserve(2 * kPage, kPage);
      backend->map(address, kPage, backend->create(kPage));
      backend->create(kPage);
    }
    CHECK_EQ(vendor.live_handles(), std::size_t{0});
    CHECK_EQ(vendor.live_mappings(), std::size_t{0});
    CHECK_EQ(vendor.live_reservations(), std::size_t{0});
    CHECK_EQ(count_fds(), num_fds);
  });
}

TEST(a_library_that_is_missing_or_is_another_is_an_unsupported_device) {
  for (const std::string name : {"cuda", "acl"}) {
    BackendOptions options;
    options.library = "/nowhere/libnothing.so";
    CHECK_THROWS(kUnsupported, open_backend(name, options));
    options.library = "libc.so.6";
    CHECK_THROWS(kUnsupported, open_backend(name, options));
  }
}

TEST(a_device_that_cannot_is_refused_when_it_is_opened) {
  for_each_vendor([](const Vendor& vendor) {
    vendor.set_vmm_supported(false);
    CHECK_THROWS(kUnsupported, vendor.open());
    vendor.set_vmm_supported(true);
    for (const std::size_t granularity : {std::size_t{0}, 3 * kPage, kPage + 1}) {
      vendor.set_granularity(granularity);
      CHECK_THROWS(kBadGranularity, vendor.open());
    }
    vendor.set_granularity(kPage);
    BackendOptions options;
    options.library = vendor.library;
    options.device_id = 99;
    CHECK_THROWS(kInvalidArgument, open_backend(vendor.name, options));
    CHECK_EQ(vendor.open()->granularity(), kPage);
  });
}

// AscendCL's functions need a device on the calling thread; no caller here sets one.
TEST(any_thread_may_call) {
  for_each_vendor([](const Vendor& vendor) {
    World world(vendor);
    std::optional<std::string> failure;
    std::thread([&] {
      try {
        world.tensor.map_slots(2, 4);
        world.tensor.unmap_slots(0, kNumSlots);
      } catch (const std::exception& error) {
        failure = error.what();
      }
    }).join();
    CHECK(!failure);
    world.check_books();
  });
}

TEST(an_import_takes_its_descriptor_and_a_refused_one_does_not) {
  const Vendor& cuda = vendors()[0];
  cuda.reset();
  const BackendPtr backend = cuda.open();
  const std::size_t num_fds = count_fds();
  Exported exported = backend->export_handle(backend->create(kPage));
  backend->import_handle(exported);
  CHECK_EQ(fcntl(exported.fd, F_GETFD), -1);
  exported.fd = open("/dev/null", O_RDWR | O_CLOEXEC);
  CHECK_THROWS(kVendorCall, backend->import_handle(exported));
  CHECK_EQ(close(exported.fd), 0);
  CHECK(count_fds() <= num_fds + 2);  // the simulator's own, of the two handles
}

TEST(a_page_is_exported_as_often_as_wanted) {
  for_each_vendor([](const Vendor& vendor) {
    const BackendPtr backend = vendor.open();
    const Handle page = backend->create(kPage);
    for (int i = 0; i < 3; ++i) {
      const Exported exported = backend->export_handle(page);
      CHECK_EQ(exported.num_bytes, kPage);
      if (exported.fd >= 0) close(exported.fd);
    }
  });
}

// The caller's own device, of another library on the same thread, is what it was.
TEST(a_threads_own_device_stays_its_own) {
  const Vendor& acl = vendors()[1];
  acl.reset();
  const BackendPtr backend = acl.open();
  const int num_before = acl.count("aclrtSetDevice");
  std::int32_t device = -1;
  std::thread([&] {
    auto* set_device = acl.control<int(std::int32_t)>("aclrtSetDevice");
    auto* get_device = acl.control<int(std::int32_t*)>("aclrtGetDevice");
    set_device(2);
    const Address address = backend->reserve(kPage, kPage);
    backend->map(address, kPage, backend->create(kPage));
    backend->unmap(address, kPage);
    get_device(&device);
  }).join();
  CHECK_EQ(device, 2);
  CHECK_EQ(acl.count("aclrtSetDevice") - num_before, 1 + 2 * 4);  // there and back, four calls
}
