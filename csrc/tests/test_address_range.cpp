// address_range.cpp over every backend: somebody else's pages at addresses of one's own.
#include "address_range.h"

#include <algorithm>
#include <random>

#include "dlpack.h"
#include "tests/support.h"

using namespace support;

namespace {

using Mapped = std::vector<bool>;

std::vector<Handle> make_pages(Backend& backend, std::size_t count) {
  std::vector<Handle> pages;
  for (std::size_t i = 0; i < count; ++i) pages.push_back(backend.create(kPage));
  return pages;
}

AddressRange make_range(const BackendPtr& backend, std::size_t num_pages) {
  return AddressRange(backend, num_pages * kPage, kPage);
}

// A word at the start and the end of a page says which it is.
void mark(Backend& backend, Address page, std::uint64_t word) {
  const std::string_view bytes(reinterpret_cast<const char*>(&word), sizeof(word));
  backend.poke(page, bytes);
  backend.poke(page + kPage - sizeof(word), bytes);
}

bool is_marked(Backend& backend, Address page, std::uint64_t word) {
  const auto holds = [&](Address at) {
    const std::vector<std::uint8_t> found = backend.peek(at, sizeof(word));
    return !std::memcmp(found.data(), &word, sizeof(word));
  };
  return holds(page) && holds(page + kPage - sizeof(word));
}

std::size_t num_mapped(const AddressRange& range) {
  const Mapped mapped = range.mapped_pages();
  return static_cast<std::size_t>(std::count(mapped.begin(), mapped.end(), true));
}

}  // namespace

TEST(a_tensors_pages_are_the_same_memory_at_the_ranges_addresses) {
  for_each_backend([](const BackendPtr& backend) {
    VirtualTensor tensor(make_pool(backend), 4, kPage + kPage / 2);
    tensor.map_slots(0, 1);
    tensor.map_slots(3, 1);
    const auto handles = tensor.page_handles();
    CHECK_EQ(handles.size(), std::size_t{6});
    AddressRange range = make_range(backend, 6);
    for (std::size_t page = 0; page < 6; ++page) {
      CHECK_EQ(handles[page].has_value(), page < 2 || page > 3);
      if (handles[page]) range.map(page, {*handles[page]});
    }
    CHECK(range.mapped_pages() == Mapped{true, true, false, false, true, true});
    for (const std::size_t page : {0, 1, 4, 5}) {
      mark(*backend, tensor.address() + page * kPage, page + 1);
      CHECK(is_marked(*backend, range.address() + page * kPage, page + 1));
      mark(*backend, range.address() + page * kPage, page + 10);
      CHECK(is_marked(*backend, tensor.address() + page * kPage, page + 10));
    }
    CHECK_EQ(signal_of_reading(range.address() + 2 * kPage), SIGSEGV);
    range.unmap(0, 6);
    CHECK(is_marked(*backend, tensor.address() + 5 * kPage, 15));
  });
}

TEST(one_page_may_be_behind_a_whole_range) {
  for_each_backend([](const BackendPtr& backend) {
    const Handle scratch = backend->create(kPage);
    AddressRange range = make_range(backend, 5);
    range.map(0, std::vector<Handle>(5, scratch));
    mark(*backend, range.address() + 3 * kPage, 7);
    for (std::size_t page = 0; page < 5; ++page) {
      CHECK(is_marked(*backend, range.address() + page * kPage, 7));
    }
    // Attaching: real pages take its place, at the same addresses.
    const std::vector<Handle> pages = make_pages(*backend, 2);
    range.unmap(1, 2);
    range.map(1, pages);
    mark(*backend, range.address() + kPage, 8);
    mark(*backend, range.address() + 2 * kPage, 9);
    CHECK(is_marked(*backend, range.address(), 7));
    range.unmap(1, 2);
    range.map(1, {scratch, scratch});
    CHECK(is_marked(*backend, range.address() + 2 * kPage, 7));
    range.unmap(1, 2);
    range.map(1, pages);
    CHECK(is_marked(*backend, range.address() + kPage, 8));
    CHECK(is_marked(*backend, range.address() + 2 * kPage, 9));
  });
}

TEST(unmapping_an_edge_leaves_the_rest) {
  for_each_backend([](const BackendPtr& backend) {
    const std::vector<Handle> pages = make_pages(*backend, 4);
    AddressRange range = make_range(backend, 4);
    range.map(0, pages);
    for (std::size_t page = 0; page < 4; ++page) {
      mark(*backend, range.address() + page * kPage, page);
    }
    range.unmap(0, 1);
    range.unmap(3, 1);
    CHECK_EQ(signal_of_reading(range.address() + kPage - 1), SIGSEGV);
    CHECK_EQ(signal_of_reading(range.address() + 3 * kPage), SIGSEGV);
    CHECK(is_marked(*backend, range.address() + kPage, 1));
    CHECK(is_marked(*backend, range.address() + 2 * kPage, 2));
    range.unmap(0, 4);  // passes over what is not mapped
    range.unmap(0, 4);
    range.unmap(4, 0);
    CHECK_EQ(num_mapped(range), std::size_t{0});
    range.map(0, {pages[3], pages[2], pages[1], pages[0]});
    CHECK(is_marked(*backend, range.address(), 3));
    CHECK(is_marked(*backend, range.address() + 3 * kPage, 0));
  });
}

TEST(a_mapped_position_is_refused_and_nothing_changes) {
  for_each_backend([](const BackendPtr& backend) {
    const std::vector<Handle> pages = make_pages(*backend, 4);
    AddressRange range = make_range(backend, 4);
    range.map(2, {pages[0]});
    mark(*backend, range.address() + 2 * kPage, 5);
    CHECK_THROWS(kPageMapped, range.map(2, {pages[1]}));
    CHECK_THROWS(kPageMapped, range.map(0, pages));
    CHECK(range.mapped_pages() == Mapped{false, false, true, false});
    CHECK(is_marked(*backend, range.address() + 2 * kPage, 5));
    CHECK_EQ(signal_of_reading(range.address()), SIGSEGV);
    CHECK_THROWS(kPageMapped, backend->destroy(pages[0]));
  });
}

TEST(an_unknown_handle_maps_nothing) {
  for_each_backend([](const BackendPtr& backend) {
    const std::vector<Handle> pages = make_pages(*backend, 2);
    AddressRange range = make_range(backend, 4);
    CHECK_THROWS(kInvalidArgument, range.map(0, {pages[0], pages[1], Handle{12345}}));
    CHECK_EQ(num_mapped(range), std::size_t{0});
    CHECK_EQ(signal_of_reading(range.address()), SIGSEGV);
    backend->destroy(pages[0]);  // nowhere mapped
    CHECK_THROWS(kInvalidArgument, range.map(0, {pages[0]}));
  });
}

TEST(pages_that_are_not_there_and_sizes_that_make_no_sense_are_refused) {
  const BackendPtr backend = open_host_pages(4);
  const Handle page = backend->create(kPage);
  AddressRange range(backend, 3 * kPage + 1, kPage);
  CHECK_EQ(range.num_bytes(), 4 * kPage);
  CHECK_EQ(range.page_bytes(), kPage);
  CHECK_THROWS(kInvalidArgument, range.map(4, {page}));
  CHECK_THROWS(kInvalidArgument, range.map(3, {page, page}));
  CHECK_THROWS(kInvalidArgument, range.unmap(1, kNoLimit));
  CHECK_THROWS(kInvalidArgument, range.unmap(5, 0));
  range.map(4, {});
  CHECK_THROWS(kInvalidArgument, AddressRange(backend, 0, kPage));
  CHECK_THROWS(kInvalidArgument, AddressRange(backend, kNoLimit, kPage));
  CHECK_THROWS(kBadGranularity, AddressRange(backend, kPage, 0));
  CHECK_THROWS(kBadGranularity, AddressRange(backend, kPage, kPage / 2));
}

TEST(pages_may_be_larger_than_the_granularity) {
  for_each_vendor([](const Vendor& vendor) {
    const BackendPtr backend = vendor.open();
    const Handle page = backend->create(3 * kPage);
    AddressRange range(backend, 7 * kPage, 3 * kPage);
    CHECK_EQ(range.num_bytes(), 9 * kPage);
    range.map(1, {page});
    CHECK_THROWS(kInvalidArgument, range.map(0, {backend->create(kPage)}));
    mark(*backend, range.address() + 5 * kPage, 3);
    CHECK(range.mapped_pages() == Mapped{false, true, false});
  });
}

TEST(a_range_that_ends_gives_back_its_addresses_and_no_page) {
  for_each_vendor([](const Vendor& vendor) {
    const BackendPtr backend = vendor.open();
    const std::vector<Handle> pages = make_pages(*backend, 3);
    {
      AddressRange range = make_range(backend, 3);
      range.map(0, pages);
      CHECK_EQ(vendor.live_mappings(), std::size_t{3});
    }
    CHECK_EQ(vendor.live_mappings(), std::size_t{0});
    CHECK_EQ(vendor.live_reservations(), std::size_t{0});
    CHECK_EQ(vendor.live_handles(), std::size_t{3});
    for (const Handle page : pages) backend->destroy(page);
  });
}

TEST(a_map_rolls_back_when_the_nth_call_fails_for_every_n) {
  for_each_vendor([](const Vendor& vendor) {
    for (const char* call : {vendor.map, vendor.set_access}) {
      if (!*call) continue;
      for (int nth = 1; nth <= (call == vendor.map ? 4 : 1); ++nth) {
        vendor.reset();
        const BackendPtr backend = vendor.open();
        const std::vector<Handle> pages = make_pages(*backend, 4);
        AddressRange range = make_range(backend, 6);
        vendor.fail(call, nth, vendor.out_of_memory);
        CHECK_THROWS(kExhausted, range.map(1, pages));
        CHECK_EQ(num_mapped(range), std::size_t{0});
        CHECK_EQ(vendor.live_mappings(), std::size_t{0});
        range.map(1, pages);
        mark(*backend, range.address() + 4 * kPage, 6);
      }
    }
  });
}

TEST(a_page_that_its_rollback_cannot_unmap_stays_mapped_and_is_tried_again) {
  for_each_vendor([](const Vendor& vendor) {
    for (int nth = 2; nth <= 4; ++nth) {
      for (int failed_unmap = 1; failed_unmap < nth; ++failed_unmap) {
        vendor.reset();
        const BackendPtr backend = vendor.open();
        const std::vector<Handle> pages = make_pages(*backend, 4);
        AddressRange range = make_range(backend, 6);
        vendor.fail(vendor.map, nth, vendor.out_of_memory);
        vendor.fail(vendor.unmap, failed_unmap, vendor.broken);
        vendor.fail(vendor.unmap, nth, vendor.broken);  // the second try
        CHECK_THROWS(kExhausted, range.map(1, pages));  // the first failure is told
        CHECK_EQ(num_mapped(range), std::size_t{1});
        CHECK_EQ(vendor.live_mappings(), std::size_t{1});
        CHECK_THROWS(kPageMapped, range.map(1, pages));
        range.unmap(0, 6);
        range.map(1, pages);
        mark(*backend, range.address() + 4 * kPage, 6);
      }
    }
  });
}

TEST(an_unmap_that_fails_somewhere_unmaps_the_rest_and_is_tried_again) {
  for_each_vendor([](const Vendor& vendor) {
    for (int nth = 1; nth <= 4; ++nth) {
      vendor.reset();
      const BackendPtr backend = vendor.open();
      AddressRange range = make_range(backend, 4);
      range.map(0, make_pages(*backend, 4));
      vendor.fail(vendor.unmap, nth, vendor.broken);
      CHECK_THROWS(kVendorCall, range.unmap(0, 4));
      Mapped wanted(4, false);
      wanted[static_cast<std::size_t>(nth - 1)] = true;
      CHECK(range.mapped_pages() == wanted);
      CHECK_EQ(vendor.live_mappings(), std::size_t{1});
      range.unmap(0, 4);
      CHECK_EQ(vendor.live_mappings(), std::size_t{0});
    }
  });
}

TEST(a_failed_unmap_in_a_destructor_is_survived) {
  for_each_vendor([](const Vendor& vendor) {
    const BackendPtr backend = vendor.open();
    const std::vector<Handle> pages = make_pages(*backend, 2);
    {
      AddressRange range = make_range(backend, 2);
      range.map(0, pages);
      vendor.fail(vendor.unmap, 1, vendor.broken);
    }
    AddressRange range = make_range(backend, 2);  // and the next one works
    range.map(0, pages);
    mark(*backend, range.address(), 1);
  });
}

// Random maps, unmaps and failures against what should lie where.
TEST(random_maps_and_unmaps_hold_what_a_model_says) {
  const auto run = [](const BackendPtr& backend, const Vendor* vendor) {
    constexpr std::size_t kNumPositions = 24;
    std::mt19937 random(vendor ? 2 : 1);
    const std::vector<Handle> pages = make_pages(*backend, 8);
    AddressRange all = make_range(backend, pages.size());
    all.map(0, pages);
    for (std::size_t i = 0; i < pages.size(); ++i) mark(*backend, all.address() + i * kPage, i);
    AddressRange range = make_range(backend, kNumPositions);
    std::map<std::size_t, std::size_t> model;  // position -> page; unmapped ones are not in it
    for (int step = 0; step < 400; ++step) {
      const std::size_t first = random() % kNumPositions;
      const std::size_t count = 1 + random() % std::min<std::size_t>(8, kNumPositions - first);
      if (vendor && random() % 8 == 0) {
        const char* call = random() % 2 ? vendor->map : vendor->unmap;
        vendor->fail(call, static_cast<int>(1 + random() % 6), vendor->broken);
      }
      if (random() % 2) {
        std::vector<Handle> chosen;
        std::map<std::size_t, std::size_t> wanted = model;
        for (std::size_t i = 0; i < count; ++i) {
          const std::size_t page = random() % pages.size();
          chosen.push_back(pages[page]);
          wanted[first + i] = page;
        }
        try {
          range.map(first, chosen);
          CHECK_EQ(wanted.size(), model.size() + count);  // else it had to be refused
          model = wanted;
        } catch (const VmmError& error) {
          CHECK(error.kind == ErrorKind::kPageMapped || vendor);
          // What a failed rollback left behind; its contents may not be accessible.
          if (error.kind != ErrorKind::kPageMapped) {
            const Mapped left = range.mapped_pages();
            for (std::size_t i = first; i < first + count; ++i) {
              CHECK(!left[i] || !model.count(i));
              while (range.mapped_pages()[i]) {
                try {
                  range.unmap(i, 1);
                } catch (const VmmError&) {
                }
              }
            }
          }
        }
      } else {
        try {
          range.unmap(first, count);
        } catch (const VmmError&) {
          CHECK(vendor);
        }
        const Mapped left = range.mapped_pages();
        for (std::size_t i = first; i < first + count; ++i) {
          CHECK(!left[i] || vendor);
          if (!left[i]) model.erase(i);
        }
      }
      const Mapped mapped = range.mapped_pages();
      for (std::size_t i = 0; i < kNumPositions; ++i) {
        CHECK_EQ(bool{mapped[i]}, model.count(i) == 1);
        if (mapped[i]) CHECK(is_marked(*backend, range.address() + i * kPage, model[i]));
      }
    }
  };
  for (const bool populate : {true, false}) run(open_host_pages(16, kPage, populate), nullptr);
  for_each_vendor([&](const Vendor& vendor) { run(vendor.open(), &vendor); });
  on_device([&](const BackendPtr& device) { run(device, nullptr); });
}

TEST(a_dlpack_tensor_keeps_the_range) {
  const BackendPtr backend = open_host_pages(4);
  auto range = std::make_shared<AddressRange>(backend, 2 * kPage, kPage);
  range->map(0, {backend->create(kPage), backend->create(kPage)});
  const std::weak_ptr<AddressRange> watched = range;
  DlpackTensor* made = make_dlpack(range, {3, 5}, "int64", kPage);
  range.reset();
  CHECK(!watched.expired());
  delete_dlpack(made);
  CHECK(watched.expired());
}

TEST(a_dlpack_tensor_lies_inside_the_range_at_a_multiple_of_its_element) {
  const auto range = std::make_shared<AddressRange>(open_host_pages(4), 2 * kPage, kPage);
  const auto refuse = [&](const std::vector<std::int64_t>& shape, const std::string& dtype,
                          std::size_t offset_bytes) {
    CHECK_THROWS(kInvalidArgument, make_dlpack(range, shape, dtype, offset_bytes));
  };
  const auto accept = [&](const std::vector<std::int64_t>& shape, const std::string& dtype,
                          std::size_t offset_bytes) {
    delete_dlpack(make_dlpack(range, shape, dtype, offset_bytes));
  };
  const auto all = static_cast<std::int64_t>(2 * kPage);
  accept({all}, "uint8", 0);
  refuse({all}, "uint8", 1);
  refuse({all + 1}, "uint8", 0);
  refuse({all / 8 + 1}, "float64", 0);
  accept({all / 16, 2}, "int32", static_cast<std::size_t>(all) / 2);
  refuse({1}, "float32", 2);
  refuse({1}, "float64", 4);
  accept({1}, "bfloat16", 2);
  accept({}, "float32", 2 * kPage - 4);
  refuse({}, "float32", 2 * kPage);
  accept({0}, "float32", 2 * kPage);
  refuse({0}, "float32", 2 * kPage + 4);
  refuse({-1}, "uint8", 0);
  refuse({std::int64_t{1} << 62, std::int64_t{1} << 62}, "uint8", 0);
  refuse({1}, "complex64", 0);
}
