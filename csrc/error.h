// Every error of csrc: what happened, in which vendor call, with which code, at which line.
//
//   VmmError.kind      policy                  Python class (bindings.cpp)
//   kInvalidArgument   caller must fix         InvalidArgumentError
//   kSlotMapped        caller must fix         SlotMappedError
//   kPageMapped        caller must fix         PageMappedError
//   kBadGranularity    this device cannot      BadGranularityError
//   kUnsupported       this device cannot      UnsupportedDeviceError
//   kExhausted         retry when memory left  PoolExhaustedError
//   kPeerGone          retry with a new peer   PeerGoneError
//   kVendorCall        see the vendor's code   VendorCallError
//   kIntegrity         a defect here           IntegrityError
//
// Nothing in csrc exits or aborts; destructors swallow, everything else throws.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace sgl_vmm {

enum class ErrorKind {
  kInvalidArgument,
  kSlotMapped,
  kPageMapped,
  kBadGranularity,
  kUnsupported,
  kExhausted,
  kPeerGone,
  kVendorCall,
  kIntegrity,
};

class VmmError : public std::runtime_error {
 public:
  VmmError(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind(kind) {}

  // A vendor call that failed: "cuda: cuMemCreate -> CUDA_ERROR_OUT_OF_MEMORY (2) [cuda.cpp:91]".
  VmmError(ErrorKind kind, std::string backend, std::string call, long code, std::string code_name,
           const char* file, int line)
      : std::runtime_error(backend + ": " + call + " -> " + code_name + " (" +
                           std::to_string(code) + ") [" + base_name(file) + ":" +
                           std::to_string(line) + "]"),
        kind(kind),
        backend(std::move(backend)),
        call(std::move(call)),
        code(code),
        code_name(std::move(code_name)) {}

  const ErrorKind kind;
  const std::string backend;    // "host", "cuda", "acl"; empty where no vendor call failed
  const std::string call;       // the vendor's function
  const long code = 0;          // the vendor's code, errno for the host
  const std::string code_name;  // its name

 private:
  static std::string base_name(const std::string& path) {
    return path.substr(path.find_last_of('/') + 1);
  }
};

}  // namespace sgl_vmm
