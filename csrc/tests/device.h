// The tests over all backends, on a real device too:
//
//   SGL_VMM_DEVICE=cuda ./test_virtual_tensor      adds the device's backend to host and simulators
//   SGL_VMM_DEVICE_LIBRARY=...                     its driver, or a simulator of it
//
// Built with SGL_VMM_TEST_PAGE_BYTES of the device's granularity, 2 MiB. Contents go through the
// driver, because a device's addresses mean nothing to the CPU.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "vmm/backend.h"

namespace support {

class CudaCopies {
 public:
  explicit CudaCopies(const std::string& library)
      : handle_(dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (!handle_) throw std::runtime_error(library + " cannot be opened");
    void* context = nullptr;
    call<int(unsigned)>("cuInit", 0u);
    call<int(void**, int)>("cuDevicePrimaryCtxRetain", &context, 0);
    call<int(void*)>("cuCtxSetCurrent", context);
  }

  void write(std::uint64_t to, const void* from, std::size_t num_bytes) const {
    call<int(std::uint64_t, const void*, std::size_t)>("cuMemcpyHtoD_v2", to, from, num_bytes);
  }
  // False where the driver refuses the address.
  bool read(void* to, std::uint64_t from, std::size_t num_bytes) const {
    return !symbol<int(void*, std::uint64_t, std::size_t)>("cuMemcpyDtoH_v2")(to, from, num_bytes);
  }

 private:
  template <typename Function>
  Function* symbol(const char* name) const {
    void* found = dlsym(handle_, name);
    if (!found) throw std::runtime_error(std::string("the driver has no ") + name);
    return reinterpret_cast<Function*>(found);
  }
  template <typename Function, typename... Arguments>
  void call(const char* name, Arguments... arguments) const {
    const int result = symbol<Function>(name)(arguments...);
    if (result) throw std::runtime_error(std::string(name) + " -> " + std::to_string(result));
  }

  void* const handle_;
};

// Set while a test runs on the device.
inline const CudaCopies* device_copies = nullptr;

inline bool has_device() { return std::getenv("SGL_VMM_DEVICE") != nullptr; }

// Runs a test on the device, if there is one.
template <typename Run>
void on_device(Run run) {
  if (!has_device()) return;
  const char* library = std::getenv("SGL_VMM_DEVICE_LIBRARY");
  const CudaCopies copies(library ? library : "libcuda.so.1");
  sgl_vmm::BackendOptions options;
  options.library = library ? library : "";
  struct Active {
    explicit Active(const CudaCopies& copies) { device_copies = &copies; }
    ~Active() { device_copies = nullptr; }
  };
  const Active active(copies);
  try {
    run(sgl_vmm::open_backend(std::getenv("SGL_VMM_DEVICE"), options));
  } catch (const std::exception& error) {
    throw std::runtime_error(std::string("on the device: ") + error.what());
  }
}

}  // namespace support
