// A vendor's library, opened at run time: nothing in csrc links one.
//
//   cuda.cpp, acl.cpp --> [DynamicLibrary] --> dlopen, dlsym
#pragma once

#include <dlfcn.h>

#include <string>
#include <utility>

#include "error.h"

namespace sgl_vmm {

// Never closed: a driver's library leaves threads and exit handlers behind, so its code has to stay
// for the life of the process.
class DynamicLibrary {
 public:
  // `remedy` ends each message: what the user installs or sets.
  DynamicLibrary(std::string name, std::string remedy)
      : name_(std::move(name)),
        remedy_(std::move(remedy)),
        handle_(dlopen(name_.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (!handle_) {
      throw VmmError(ErrorKind::kUnsupported, "cannot open " + name_ + ": " + reason() + "; " +
                                                  remedy_);
    }
  }

  // `Function` is a function type, as in `library.symbol<int(int)>("abs")`.
  template <typename Function>
  Function* symbol(const char* symbol_name) const {
    auto* function = reinterpret_cast<Function*>(dlsym(handle_, symbol_name));
    if (!function) {
      throw VmmError(ErrorKind::kUnsupported,
                     name_ + " has no " + symbol_name + ", it is too old; " + remedy_);
    }
    return function;
  }

 private:
  static std::string reason() {
    const char* text = dlerror();
    return text ? text : "no reason given";
  }

  std::string name_;
  std::string remedy_;
  void* handle_;
};

}  // namespace sgl_vmm
