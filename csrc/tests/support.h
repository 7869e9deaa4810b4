// What the tests of csrc share: the host backend and both simulators to open, tensors with known
// contents, child processes.
#pragma once

#include <dirent.h>
#include <dlfcn.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "tests/device.h"
#include "virtual_tensor.h"

namespace support {

using namespace sgl_vmm;

#ifdef SGL_VMM_TEST_PAGE_BYTES  // tests/device.h
constexpr std::size_t kPage = SGL_VMM_TEST_PAGE_BYTES;
#else
constexpr std::size_t kPage = std::size_t{64} << 10;
#endif

inline std::uint8_t* bytes_at(Address address) { return reinterpret_cast<std::uint8_t*>(address); }

inline std::size_t count_fds() {
  DIR* folder = opendir("/proc/self/fd");
  std::size_t count = 0;
  while (readdir(folder)) ++count;
  closedir(folder);
  return count - 3;  // `.`, `..` and the folder's own
}

// The controls of one simulator (tests/simulators/simulator.cpp), and what its vendor calls things.
struct Vendor {
  const char* name;
  const char* library;
  const char* reserve;
  const char* release;
  const char* create;
  const char* destroy;
  const char* map;
  const char* unmap;
  const char* set_access;  // what set_access calls; "" = nothing
  int out_of_memory;
  int broken;  // a code of kind kVendorCall

  template <typename Function>
  Function* control(const char* symbol) const {
    void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    void* found = handle ? dlsym(handle, symbol) : nullptr;
    if (!found) throw std::runtime_error(std::string(library) + " has no " + symbol);
    dlclose(handle);
    return reinterpret_cast<Function*>(found);
  }
  void fail(const char* call, int nth, int code) const {
    control<void(const char*, int, int)>("sim_fail")(call, nth, code);
  }
  int count(const char* call) const { return control<int(const char*)>("sim_count")(call); }
  std::size_t live_handles() const {
    return static_cast<std::size_t>(control<int()>("sim_live_handles")());
  }
  std::size_t live_mappings() const {
    return static_cast<std::size_t>(control<int()>("sim_live_mappings")());
  }
  std::size_t live_reservations() const {
    return static_cast<std::size_t>(control<int()>("sim_live_reservations")());
  }
  void set_granularity(std::size_t num_bytes) const {
    control<void(std::size_t)>("sim_set_granularity")(num_bytes);
  }
  void set_memory(std::size_t num_bytes) const {
    control<void(std::size_t)>("sim_set_memory")(num_bytes);
  }
  void set_vmm_supported(bool is_supported) const {
    control<void(int)>("sim_set_vmm_supported")(is_supported);
  }
  // While none of its backends is open.
  void reset(std::size_t granularity = kPage) const {
    // Once opened it has to stay open: a later dlopen would start with fresh state.
    static std::map<std::string, void*> kept_open;
    if (!kept_open[library]) kept_open[library] = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    control<void()>("sim_reset")();
    set_granularity(granularity);
  }
  BackendPtr open() const {
    BackendOptions options;
    options.library = library;
    return open_backend(name, options);
  }
};

inline const std::vector<Vendor>& vendors() {
  static const std::vector<Vendor> all = {
      {"cuda", SGL_VMM_CUDA_SIMULATOR, "cuMemAddressReserve", "cuMemAddressFree", "cuMemCreate",
       "cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemSetAccess", 2, 1},
      {"acl", SGL_VMM_ACL_SIMULATOR, "aclrtReserveMemAddress", "aclrtReleaseMemAddress",
       "aclrtMallocPhysical", "aclrtFreePhysical", "aclrtMapMem", "aclrtUnmapMem", "", 207001,
       507000}};
  return all;
}

// Runs a test once for each vendor, on a fresh simulator, and says which failed.
inline void for_each_vendor(const std::function<void(const Vendor&)>& run) {
  for (const Vendor& vendor : vendors()) {
    vendor.reset();
    try {
      run(vendor);
    } catch (const std::exception& error) {
      throw std::runtime_error(std::string("on ") + vendor.name + ": " + error.what());
    }
  }
}

inline BackendPtr open_host_pages(std::size_t num_pages, std::size_t page_bytes = kPage,
                                  bool populate = true) {
  BackendOptions options;
  options.page_bytes = page_bytes;
  options.capacity_bytes = num_pages * page_bytes;
  options.populate = populate;
  return open_backend("host", options);
}

// Runs a test over host memory, over both simulators, and on a device if one is named. All have
// pages of `page_bytes`.
inline void for_each_backend(const std::function<void(const BackendPtr&)>& run,
                             std::size_t page_bytes = kPage) {
  run(open_host_pages(256, page_bytes));
  for_each_vendor([&](const Vendor& vendor) {
    vendor.reset(page_bytes);
    run(vendor.open());
  });
  on_device(run);
}

inline std::shared_ptr<PagePool> make_pool(BackendPtr backend, PoolLimits limits = {}) {
  const std::size_t page_bytes = backend->granularity();
  return std::make_shared<PagePool>(std::move(backend), page_bytes, limits);
}

inline PoolLimits budget(std::size_t max_pages) {
  PoolLimits limits;
  limits.max_pages = max_pages;
  return limits;
}

// Bytes that differ between seeds nearly everywhere, cheap to copy and to compare.
inline const std::uint8_t* pattern(std::size_t seed, std::size_t num_bytes) {
  static std::vector<std::uint8_t> noise;
  std::uint64_t state = 0x9e3779b97f4a7c15u + noise.size();
  while (noise.size() < num_bytes + 4099) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    noise.push_back(static_cast<std::uint8_t>(state >> 56));
  }
  return noise.data() + seed * 37 % 4099;
}

inline void fill_slot(const VirtualTensor& tensor, std::size_t slot, std::size_t seed) {
  const Address to = tensor.address() + slot * tensor.slot_bytes();
  const std::uint8_t* wanted = pattern(seed, tensor.slot_bytes());
  if (device_copies) return device_copies->write(to, wanted, tensor.slot_bytes());
  std::memcpy(bytes_at(to), wanted, tensor.slot_bytes());
}

inline bool slot_holds(const VirtualTensor& tensor, std::size_t slot, std::size_t seed) {
  const Address from = tensor.address() + slot * tensor.slot_bytes();
  const std::uint8_t* wanted = pattern(seed, tensor.slot_bytes());
  if (!device_copies) return !std::memcmp(bytes_at(from), wanted, tensor.slot_bytes());
  std::vector<std::uint8_t> found(tensor.slot_bytes());
  return device_copies->read(found.data(), from, found.size()) &&
         !std::memcmp(found.data(), wanted, found.size());
}

// Runs `child(socket)` in a process of its own and `parent(socket)` here; the child's checks count.
inline int run_in_child(const std::function<void(int)>& child,
                        const std::function<void(int)>& parent = [](int) {}) {
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) {
    throw std::runtime_error("socketpair");
  }
  std::fflush(stdout);
  const pid_t pid = fork();
  if (pid == 0) {
    close(sockets[0]);
    try {
      child(sockets[1]);
      _exit(0);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child: %s\n", error.what());
      _exit(1);
    }
  }
  close(sockets[1]);
  int status = -1;
  try {
    parent(sockets[0]);
  } catch (...) {
    close(sockets[0]);
    waitpid(pid, &status, 0);
    throw;
  }
  close(sockets[0]);
  waitpid(pid, &status, 0);
  return status;
}

// The signal that reading this address ends a process with; 0 = it was served. A device's driver
// refuses to read it, which counts as SIGSEGV.
inline int signal_of_reading(Address address) {
  if (device_copies) {
    std::uint8_t byte;
    return device_copies->read(&byte, address, 1) ? 0 : SIGSEGV;
  }
  const int status = run_in_child([address](int) {
    const rlimit no_core{0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    signal(SIGSEGV, SIG_DFL);  // a sanitizer has its own handler
    signal(SIGBUS, SIG_DFL);
    static_cast<void>(*static_cast<volatile std::uint8_t*>(bytes_at(address)));
  });
  return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

}  // namespace support
