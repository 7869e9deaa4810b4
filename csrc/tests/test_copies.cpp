// Backend::copy, peek and poke over every backend: which bytes move, and what is refused.
#include <atomic>
#include <optional>
#include <thread>

#include "share.h"
#include "tests/support.h"

using namespace support;

namespace {

constexpr std::size_t kNumPages = 3;
constexpr std::size_t kTotal = kNumPages * kPage;

Address map_new(Backend& backend, std::size_t num_pages = kNumPages) {
  const Address address = backend.reserve(num_pages * kPage, kPage);
  std::vector<Handle> pages;
  for (std::size_t i = 0; i < num_pages; ++i) pages.push_back(backend.create(kPage));
  backend.map_run(address, kPage, pages);
  return address;
}

void poke_pattern(Backend& backend, Address address, std::size_t seed, std::size_t num_bytes) {
  const auto* bytes = reinterpret_cast<const char*>(pattern(seed, num_bytes));
  for (std::size_t at = 0; at < num_bytes; at += kMaxPeekBytes) {
    backend.poke(address + at, {bytes + at, std::min(kMaxPeekBytes, num_bytes - at)});
  }
}

bool holds(Backend& backend, Address address, const std::uint8_t* wanted, std::size_t num_bytes) {
  const std::vector<std::uint8_t> found = backend.peek(address, num_bytes);
  return found.size() == num_bytes && !std::memcmp(found.data(), wanted, num_bytes);
}

// The vendors' calls behind a copy, in order.
std::vector<const char*> calls_of_copy(const Vendor& vendor) {
  if (vendor.name == std::string("acl")) return {"aclrtMemcpy"};
  return {"cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuMemcpyDtoD_v2",
          "cuStreamSynchronize"};
}

}  // namespace

TEST(a_copy_moves_exactly_its_bytes_over_pages_edges) {
  for_each_backend([](const BackendPtr& backend) {
    const Address source = map_new(*backend);
    const Address destination = map_new(*backend);
    poke_pattern(*backend, source, 1, kTotal);
    poke_pattern(*backend, destination, 2, kTotal);
    const std::size_t from = kPage / 2 + 3;
    const std::size_t to = 17;
    const std::size_t num_bytes = 2 * kPage + 5;
    backend->copy(destination + to, source + from, num_bytes);
    CHECK(holds(*backend, destination, pattern(2, kTotal), to));
    CHECK(holds(*backend, destination + to, pattern(1, kTotal) + from, num_bytes));
    CHECK(holds(*backend, destination + to + num_bytes, pattern(2, kTotal) + to + num_bytes,
                kTotal - to - num_bytes));
    CHECK(holds(*backend, source, pattern(1, kTotal), kTotal));
  });
}

// Read by the CPU, which asks no driver to wait.
TEST(copies_and_pokes_are_done_when_they_return) {
  for_each_vendor([](const Vendor& vendor) {
    const BackendPtr backend = vendor.open();
    const Address source = map_new(*backend);
    const Address destination = map_new(*backend);
    poke_pattern(*backend, source, 3, kTotal);
    CHECK(!std::memcmp(bytes_at(source), pattern(3, kTotal), kTotal));
    backend->copy(destination, source, kTotal);
    CHECK(!std::memcmp(bytes_at(destination), pattern(3, kTotal), kTotal));
  });
}

TEST(neighbours_in_one_range_are_copied) {
  for_each_backend([](const BackendPtr& backend) {
    const Address address = map_new(*backend);
    poke_pattern(*backend, address, 4, kTotal);
    backend->copy(address + 64, address, 64);
    backend->copy(address, address + 128, 64);
    CHECK(holds(*backend, address + 64, pattern(4, kTotal), 64));
    CHECK(holds(*backend, address, pattern(4, kTotal) + 128, 64));
  });
}

TEST(a_copy_from_an_alias_is_a_copy_of_its_page) {
  for_each_backend([](const BackendPtr& backend) {
    const Handle page = backend->create(kPage);
    const Address at[] = {backend->reserve(kPage, kPage), backend->reserve(kPage, kPage)};
    for (const Address address : at) backend->map_run(address, kPage, {page});
    const Address destination = map_new(*backend);
    poke_pattern(*backend, at[0], 6, kPage);
    backend->copy(destination, at[1], kPage);
    CHECK(holds(*backend, destination, pattern(6, kPage), kPage));
  });
}

TEST(ranges_that_are_not_wholly_mapped_are_refused_alike_everywhere) {
  for_each_backend([](const BackendPtr& backend) {
    const Address ok = map_new(*backend);
    const Address address = map_new(*backend);
    poke_pattern(*backend, ok, 5, kTotal);
    backend->unmap(address + kPage, kPage);  // a hole in the middle
    std::uint8_t byte = 0;
    const std::string_view one(reinterpret_cast<const char*>(&byte), 1);
    struct Bad {
      Address address;
      std::size_t num_bytes;
    };
    for (const Bad& bad :
         {Bad{address + kPage, 1}, Bad{address + kPage - 1, 2}, Bad{address, kTotal},
          Bad{address + 2 * kPage - 1, 2}, Bad{address + kTotal - 1, 2}, Bad{address, 0},
          Bad{0, 1}, Bad{address, kNoLimit}, Bad{address + 1, kNoLimit}}) {
      CHECK_THROWS(kInvalidArgument, backend->copy(ok, bad.address, bad.num_bytes));
      CHECK_THROWS(kInvalidArgument, backend->copy(bad.address, ok, bad.num_bytes));
      CHECK_THROWS(kInvalidArgument, backend->peek(bad.address, bad.num_bytes));
    }
    CHECK_THROWS(kInvalidArgument, backend->poke(address + kPage, one));
    CHECK_THROWS(kInvalidArgument, backend->poke(address + kTotal, one));
    CHECK_THROWS(kInvalidArgument, backend->poke(address, {}));
    CHECK(holds(*backend, ok, pattern(5, kTotal), kTotal));
    backend->copy(address, ok, kPage);
    backend->copy(address + 2 * kPage, ok, kPage);
  });
}

// A device that touches such a page fails for good, so its driver is not asked.
TEST(a_page_without_access_is_not_copied) {
  const Vendor& cuda = vendors()[0];
  cuda.reset();
  const BackendPtr backend = cuda.open();
  const Address ok = map_new(*backend);
  const Address address = backend->reserve(2 * kPage, kPage);
  for (const Address at : {address, address + kPage}) {
    backend->map(at, kPage, backend->create(kPage));
  }
  backend->set_access(address, kPage);
  backend->copy(address, ok, kPage);
  CHECK_THROWS(kInvalidArgument, backend->copy(address, ok, kPage + 1));
  CHECK_THROWS(kInvalidArgument, backend->peek(address + kPage, 1));
  backend->set_access(address + kPage, kPage);
  backend->copy(address, ok, 2 * kPage);
}

TEST(a_copy_onto_itself_is_refused) {
  for_each_backend([](const BackendPtr& backend) {
    const Address address = map_new(*backend);
    CHECK_THROWS(kInvalidArgument, backend->copy(address, address, 1));
    CHECK_THROWS(kInvalidArgument, backend->copy(address, address + 7, 8));
    CHECK_THROWS(kInvalidArgument, backend->copy(address + kPage, address, kPage + 1));
    backend->copy(address, address + 8, 8);
    backend->copy(address + kPage, address, kPage);
  });
}

TEST(peek_and_poke_are_for_little) {
  constexpr std::size_t kBigPage = std::size_t{4} << 20;
  const BackendPtr host = open_host_pages(5, kBigPage);
  const Address address = host->reserve(5 * kBigPage, kBigPage);
  for (std::size_t i = 0; i < 5; ++i) {
    host->map(address + i * kBigPage, kBigPage, host->create(kBigPage));
  }
  const std::string most(kMaxPeekBytes, 'x');
  host->poke(address, most);
  CHECK_EQ(host->peek(address, kMaxPeekBytes).back(), std::uint8_t{'x'});
  CHECK_THROWS(kInvalidArgument, host->poke(address, most + 'x'));
  CHECK_THROWS(kInvalidArgument, host->peek(address, kMaxPeekBytes + 1));
}

TEST(a_page_of_another_process_is_copied) {
  const auto check = [](const std::function<BackendPtr()>& open) {
    const int status = run_in_child(
        [&](int socket) {
          const BackendPtr backend = open();
          const Handle imported = backend->import_handle(receive_page(socket));
          const Address theirs = backend->reserve(kPage, kPage);
          backend->map_run(theirs, kPage, {imported});
          const Address own = map_new(*backend);
          backend->copy(own + 1, theirs, kPage);
          CHECK(holds(*backend, own + 1, pattern(8, kPage), kPage));
          poke_pattern(*backend, own, 9, kPage);
          backend->copy(theirs, own, kPage);
          CHECK_EQ(write(socket, "x", 1), ssize_t{1});
        },
        [&](int socket) {
          const BackendPtr backend = open();
          const Handle page = backend->create(kPage);
          const Address address = backend->reserve(kPage, kPage);
          backend->map_run(address, kPage, {page});
          poke_pattern(*backend, address, 8, kPage);
          const Exported exported = backend->export_handle(page);
          send_page(socket, exported);
          if (exported.fd >= 0) close(exported.fd);
          char byte;
          CHECK_EQ(read(socket, &byte, 1), ssize_t{1});
          CHECK(holds(*backend, address, pattern(9, kPage), kPage));
        });
    CHECK_EQ(status, 0);
  };
  check([] { return open_host_pages(8); });
  for_each_vendor([&](const Vendor& vendor) {
    check([&] {
      vendor.reset();
      return vendor.open();
    });
  });
}

TEST(each_vendor_call_of_a_copy_that_fails_is_told_and_the_next_works) {
  for_each_vendor([](const Vendor& vendor) {
    for (const char* call : calls_of_copy(vendor)) {
      vendor.reset();
      const BackendPtr backend = vendor.open();
      const Address source = map_new(*backend);
      const Address destination = map_new(*backend);
      vendor.fail(call, 1, vendor.broken);
      try {
        backend->copy(destination, source, kPage);
        CHECK(false);
      } catch (const VmmError& error) {
        CHECK(error.kind == ErrorKind::kVendorCall && error.call == call);
      }
      poke_pattern(*backend, source, 3, kPage);
      backend->copy(destination, source, kPage);
      CHECK(holds(*backend, destination, pattern(3, kPage), kPage));
    }
  });
}

TEST(the_context_is_made_by_the_first_copy_and_given_back) {
  const Vendor& cuda = vendors()[0];
  cuda.reset();
  {
    const BackendPtr backend = cuda.open();
    const Address address = map_new(*backend);
    CHECK_EQ(cuda.count("cuDevicePrimaryCtxRetain"), 0);
    for (int i = 0; i < 3; ++i) backend->copy(address, address + kPage, kPage);
    backend->peek(address, 1);
    CHECK_EQ(cuda.count("cuDevicePrimaryCtxRetain"), 1);
    CHECK_EQ(cuda.count("cuDevicePrimaryCtxRelease_v2"), 0);
  }
  CHECK_EQ(cuda.count("cuDevicePrimaryCtxRelease_v2"), 1);
  cuda.open();
  CHECK_EQ(cuda.count("cuDevicePrimaryCtxRelease_v2"), 1);  // nothing was held
}

// Of another library on the same thread, whatever the copy meets.
TEST(a_threads_own_context_stays_its_own) {
  const Vendor& cuda = vendors()[0];
  cuda.reset();
  auto* retain = cuda.control<int(void**, int)>("cuDevicePrimaryCtxRetain");
  auto* set_current = cuda.control<int(void*)>("cuCtxSetCurrent");
  auto* get_current = cuda.control<int(void**)>("cuCtxGetCurrent");
  const BackendPtr backend = cuda.open();
  const Address address = map_new(*backend);
  const auto current_after_copies = [&](void* before) {
    void* after = nullptr;
    std::thread([&] {
      set_current(before);
      backend->copy(address, address + kPage, kPage);
      backend->poke(address, "x");
      cuda.fail("cuMemcpyDtoD_v2", 1, cuda.broken);
      CHECK_THROWS(kVendorCall, backend->copy(address, address + kPage, kPage));
      get_current(&after);
    }).join();
    return after;
  };
  void* of_device_2 = nullptr;
  CHECK_EQ(retain(&of_device_2, 2), 0);
  CHECK(current_after_copies(of_device_2) == of_device_2);
  CHECK(current_after_copies(nullptr) == nullptr);
}

// A page that one thread unmaps while others copy from it: a copy is whole, or it is refused. Large
// pages, so that an unmap that did not wait would meet a copy.
TEST(an_unmap_waits_for_copies) {
  constexpr std::size_t kLarge = std::size_t{2} << 20;
  const auto run = [](const BackendPtr& backend) {
    const Handle pages[] = {backend->create(kLarge), backend->create(kLarge),
                            backend->create(kLarge)};
    Address at[3];
    for (std::size_t i = 0; i < 3; ++i) {
      at[i] = backend->reserve(kLarge, kLarge);
      backend->map_run(at[i], kLarge, {pages[i]});
    }
    poke_pattern(*backend, at[0], 11, kLarge);
    std::atomic<int> num_running{2};
    std::atomic<int> num_wrong{0};
    const auto copy_often = [&](Address own) {
      for (int i = 0; i < 100; ++i) {
        try {
          backend->copy(own, at[0], kLarge);
          num_wrong += !holds(*backend, own, pattern(11, kLarge), kLarge);
        } catch (const VmmError& error) {
          num_wrong += error.kind != ErrorKind::kInvalidArgument;
        }
      }
      --num_running;
    };
    std::thread first(copy_often, at[1]);
    std::thread second(copy_often, at[2]);
    while (num_running > 0) {
      backend->unmap(at[0], kLarge);
      backend->map_run(at[0], kLarge, {pages[0]});
      std::this_thread::yield();
    }
    first.join();
    second.join();
    CHECK_EQ(num_wrong.load(), 0);
  };
  for_each_backend(run, kLarge);
}
