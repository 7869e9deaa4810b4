// Random loads, unloads and failures against a pure model, with a pattern in every mapped slot.
//
//   SGL_VMM_STEPS=20000 ./test_stress      longer runs than the default
#include <algorithm>
#include <cstdlib>
#include <random>

#include "tests/support.h"

using namespace support;

namespace {

constexpr std::size_t kSmallPage = 4096;  // so that much happens in little memory
constexpr std::size_t kNumSlots = 24;
constexpr std::size_t kMaxPages = 90;

const std::size_t kSlotSizes[] = {
    5 * kSmallPage + kSmallPage / 2,      // w13 of DeepSeek-V2-Lite, in pages
    2 * kSmallPage + 3 * kSmallPage / 4,  // its w2
    kSmallPage,      3 * kSmallPage,
    kSmallPage - 8,  kSmallPage + 2,
    101,             // many slots a page
    8191,            12289,  // primes
};

std::size_t num_steps() {
  const char* text = std::getenv("SGL_VMM_STEPS");
  return text ? std::strtoul(text, nullptr, 10) : 250;
}

// One layer: two tensors on one pool with the same slots mapped, and what they should hold.
class Stress {
 public:
  Stress(const BackendPtr& backend, const Vendor* vendor, std::size_t slot_bytes, unsigned seed)
      : vendor_(vendor), random_(seed), pool_(make_pool(backend, budget(kMaxPages))) {
    for (const std::size_t size : {slot_bytes, slot_bytes / 2 + 1}) {
      layers_.push_back({std::make_unique<VirtualTensor>(pool_, kNumSlots, size), {}});
    }
  }

  void run() {
    for (std::size_t step = 0; step < num_steps(); ++step) {
      take_step();
      for (const Layer& layer : layers_) check(layer);
      check_pool();
    }
  }

 private:
  struct Layer {
    std::unique_ptr<VirtualTensor> tensor;
    std::map<std::size_t, std::size_t> versions;  // mapped slot -> seed of its contents
  };

  std::size_t below(std::size_t limit) { return random_() % limit; }

  void take_step() {
    Layer& layer = layers_[below(layers_.size())];
    const std::size_t first = below(kNumSlots);
    const std::size_t count = 1 + below(std::min<std::size_t>(7, kNumSlots - first));
    const std::size_t kind = below(20);
    if (kind < 10) {
      map(layer, first, count);
    } else if (kind < 17) {
      unmap(layer, first, count);
    } else if (kind < 19) {
      resize_pool(kind == 17);
    } else if (vendor_) {
      order_failure();
    }
  }

  void resize_pool(bool is_trim) {
    try {
      is_trim ? pool_->trim(below(10)) : pool_->preallocate(below(20));
    } catch (const VmmError& error) {
      CHECK(may_fail_ || (!is_trim && error.kind == ErrorKind::kExhausted));
    }
  }

  void order_failure() {
    const char* calls[] = {vendor_->create, vendor_->map, vendor_->unmap, vendor_->destroy,
                           vendor_->set_access};
    const char* call = calls[below(*vendor_->set_access ? 5 : 4)];
    const int code = below(2) ? vendor_->out_of_memory : vendor_->broken;
    vendor_->fail(call, static_cast<int>(1 + below(12)), code);
    may_fail_ = true;
  }

  void map(Layer& layer, std::size_t first, std::size_t count) {
    const auto next = layer.versions.lower_bound(first);
    const bool is_mapped = next != layer.versions.end() && next->first < first + count;
    const std::size_t num_missing = layer.tensor->num_missing_pages(first, count);
    const bool fits = num_missing <= kMaxPages - pool_->state().num_used;
    try {
      layer.tensor->map_slots(first, count);
    } catch (const VmmError& error) {
      if (is_mapped) {
        CHECK(error.kind == ErrorKind::kSlotMapped);
      } else {
        CHECK(may_fail_ || (!fits && error.kind == ErrorKind::kExhausted));
      }
      return;
    }
    CHECK(!is_mapped && fits);
    for (std::size_t slot = first; slot < first + count; ++slot) {
      layer.versions[slot] = ++version_;
      fill_slot(*layer.tensor, slot, version_);
    }
  }

  void unmap(Layer& layer, std::size_t first, std::size_t count) {
    try {
      layer.tensor->unmap_slots(first, count);
    } catch (const VmmError&) {
      CHECK(may_fail_);
    }
    for (std::size_t slot = first; slot < first + count; ++slot) layer.versions.erase(slot);
  }

  void check(const Layer& layer) const {
    const VirtualTensor& tensor = *layer.tensor;
    const std::size_t page_bytes = pool_->page_bytes();
    tensor.check_integrity();
    std::vector<std::uint32_t> refs(tensor.page_refs().size(), 0);
    for (const auto& [slot, version] : layer.versions) {
      CHECK(slot_holds(tensor, slot, version));
      const std::size_t last = ((slot + 1) * tensor.slot_bytes() - 1) / page_bytes;
      for (std::size_t at = slot * tensor.slot_bytes() / page_bytes; at <= last; ++at) ++refs[at];
    }
    CHECK(tensor.page_refs() == refs);
    for (std::size_t slot = 0; slot < kNumSlots; ++slot) {
      CHECK_EQ(tensor.is_mapped(slot), layer.versions.count(slot) == 1);
    }
    const auto num_needed = static_cast<std::size_t>(
        std::count_if(refs.begin(), refs.end(), [](std::uint32_t n) { return n > 0; }));
    const std::size_t num_pages = tensor.state().num_pages;
    CHECK(may_fail_ ? num_pages >= num_needed : num_pages == num_needed);
  }

  void check_pool() const {
    pool_->check_integrity();
    std::size_t num_pages = 0;
    for (const Layer& layer : layers_) num_pages += layer.tensor->state().num_pages;
    CHECK_EQ(pool_->state().num_used, num_pages);
    if (!vendor_) return;
    CHECK_EQ(vendor_->live_mappings(), num_pages);
    CHECK_EQ(vendor_->live_handles(), pool_->state().num_pages);
  }

  const Vendor* const vendor_;  // null = host, where no failure is ordered
  std::mt19937 random_;
  const std::shared_ptr<PagePool> pool_;
  std::vector<Layer> layers_;
  std::size_t version_ = 0;
  bool may_fail_ = false;  // since a failure was ordered, idle pages may lie about
};

void check_sizes(const std::function<void(std::size_t, unsigned)>& run) {
  unsigned seed = 1;
  for (const std::size_t slot_bytes : kSlotSizes) {
    try {
      run(slot_bytes, seed);
    } catch (const std::exception& error) {
      throw std::runtime_error("slots of " + std::to_string(slot_bytes) + " bytes, seed " +
                               std::to_string(seed) + ": " + error.what());
    }
    ++seed;
  }
}

}  // namespace

TEST(random_loads_and_unloads_on_the_host) {
  for (const bool populate : {true, false}) {
    check_sizes([&](std::size_t slot_bytes, unsigned seed) {
      Stress(open_host_pages(kMaxPages, kSmallPage, populate), nullptr, slot_bytes, seed).run();
    });
  }
}

TEST(random_loads_unloads_and_failures_over_the_simulators) {
  for_each_vendor([](const Vendor& vendor) {
    check_sizes([&](std::size_t slot_bytes, unsigned seed) {
      vendor.reset(kSmallPage);
      Stress(vendor.open(), &vendor, slot_bytes, seed + 100).run();
    });
  });
}

TEST(random_loads_and_unloads_on_the_device) {
  on_device([](const BackendPtr& device) {
    check_sizes([&](std::size_t slot_bytes, unsigned seed) {
      Stress(device, nullptr, slot_bytes * (kPage / kSmallPage), seed + 200).run();
    });
  });
}
