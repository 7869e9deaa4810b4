#include "vmm/backend.h"

namespace sgl_vmm {

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
