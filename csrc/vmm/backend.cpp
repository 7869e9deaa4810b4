#include "vmm/backend.h"

namespace sgl_vmm {
namespace {

void check_peek(std::size_t num_bytes) {
  if (num_bytes > kMaxPeekBytes) {
    throw VmmError(ErrorKind::kInvalidArgument,
                   "peek, poke: " + std::to_string(num_bytes) + " bytes; at most " +
                       std::to_string(kMaxPeekBytes) + " a call");
  }
}

}  // namespace

std::vector<std::uint8_t> Backend::peek(Address address, std::size_t num_bytes) {
  check_peek(num_bytes);
  std::vector<std::uint8_t> data(num_bytes);
  read(data.data(), address, num_bytes);
  return data;
}

void Backend::poke(Address address, std::string_view data) {
  check_peek(data.size());
  write(address, data.data(), data.size());
}

void Backend::create_run(std::size_t num_bytes, std::size_t count, std::vector<Handle>& created) {
  for (std::size_t i = 0; i < count; ++i) created.push_back(create(num_bytes));
}

void Backend::map_run(Address address, std::size_t page_bytes,
                      const std::vector<Handle>& handles) {
  std::size_t num_mapped = 0;
  try {
    for (; num_mapped < handles.size(); ++num_mapped) {
      map(address + num_mapped * page_bytes, page_bytes, handles[num_mapped]);
    }
    set_access(address, handles.size() * page_bytes);
  } catch (const VmmError&) {
    while (num_mapped > 0) {
      --num_mapped;
      try {
        unmap(address + num_mapped * page_bytes, page_bytes);
      } catch (const VmmError&) {  // stays mapped; the first failure is the one to tell
      }
    }
    throw;
  }
}

BackendPtr open_backend(const std::string& name, const BackendOptions& options) {
  BackendPtr backend;
  if (name == "host") {
    backend = open_host(options);
  } else if (name == "cuda") {
    backend = open_cuda(options);
  } else if (name == "acl") {
    backend = open_acl(options);
  } else {
    throw VmmError(ErrorKind::kInvalidArgument,
                   "no backend \"" + name + "\": choose host, cuda or acl");
  }
  if (!is_power_of_two(backend->granularity())) {
    throw VmmError(ErrorKind::kBadGranularity,
                   name + ": granularity " + std::to_string(backend->granularity()) +
                       " bytes is not a power of two");
  }
  return backend;
}

}  // namespace sgl_vmm
