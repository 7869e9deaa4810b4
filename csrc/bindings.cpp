// The Python module sgl_vmm: names and types only. The one file that knows Python.
// Calls release the GIL, and no C++ thread ever calls into Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>

#include "dlpack.h"
#include "share.h"
#include "virtual_tensor.h"

namespace py = pybind11;
using namespace sgl_vmm;
using py::arg;
using release_gil = py::call_guard<py::gil_scoped_release>;

namespace {

constexpr std::array<const char*, 9> kErrorNames = {  // in the order of ErrorKind
    "InvalidArgumentError", "SlotMappedError",    "PageMappedError",
    "BadGranularityError",  "UnsupportedDeviceError", "PoolExhaustedError",
    "PeerGoneError",        "VendorCallError",    "IntegrityError"};

std::array<PyObject*, kErrorNames.size()> error_classes;  // owned by the module

void add_errors(py::module_& m) {
  py::exception<VmmError> root(m, "VmmError");
  for (std::size_t kind = 0; kind < kErrorNames.size(); ++kind) {
    const std::string name = std::string("sgl_vmm.") + kErrorNames[kind];
    error_classes[kind] = PyErr_NewException(name.c_str(), root.ptr(), nullptr);
    m.attr(kErrorNames[kind]) = py::handle(error_classes[kind]);
  }
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const VmmError& error) {
      const py::handle type = error_classes[static_cast<std::size_t>(error.kind)];
      py::object value = type(error.what());
      value.attr("backend") = error.backend;
      value.attr("call") = error.call;
      value.attr("code") = error.code;
      value.attr("code_name") = error.code_name;
      PyErr_SetObject(type.ptr(), value.ptr());
    }
  });
}

std::shared_ptr<PagePool> make_pool(BackendPtr backend, std::optional<std::size_t> page_bytes,
                                    std::optional<std::size_t> budget_bytes,
                                    std::size_t min_free_pages,
                                    std::optional<std::size_t> max_free_pages) {
  const std::size_t page = page_bytes.value_or(backend->granularity());
  PoolLimits limits;
  if (budget_bytes && page) limits.max_pages = *budget_bytes / page;
  limits.min_free_pages = min_free_pages;
  limits.max_free_pages = max_free_pages.value_or(kNoLimit);
  return std::make_shared<PagePool>(std::move(backend), page, limits);
}

std::shared_ptr<AddressRange> make_range(BackendPtr backend, std::size_t num_bytes,
                                         std::optional<std::size_t> page_bytes) {
  const std::size_t page = page_bytes.value_or(backend->granularity());
  return std::make_shared<AddressRange>(std::move(backend), num_bytes, page);
}

py::bytes peek(Backend& backend, Address address, std::size_t num_bytes) {
  std::vector<std::uint8_t> data;
  {
    const py::gil_scoped_release released;
    data = backend.peek(address, num_bytes);
  }
  return py::bytes(reinterpret_cast<const char*>(data.data()), data.size());
}

// Python's bytes never change, and the caller holds them.
void poke(Backend& backend, Address address, const py::bytes& data) {
  const std::string_view view = data;
  const py::gil_scoped_release released;
  backend.poke(address, view);
}

py::capsule capsule_of(DlpackTensor* made) {
  return py::capsule(made, kDlpackName, [](PyObject* capsule) {
    // Whoever takes the tensor renames the capsule, and deletes the tensor itself.
    if (!PyCapsule_IsValid(capsule, kDlpackName)) return;
    delete_dlpack(static_cast<DlpackTensor*>(PyCapsule_GetPointer(capsule, kDlpackName)));
  });
}

py::capsule tensor_to_dlpack(std::shared_ptr<VirtualTensor> tensor,
                             std::vector<std::int64_t> shape, const std::string& dtype) {
  return capsule_of(make_dlpack(std::move(tensor), std::move(shape), dtype));
}

py::capsule range_to_dlpack(std::shared_ptr<AddressRange> range, std::vector<std::int64_t> shape,
                            const std::string& dtype, std::size_t offset_bytes) {
  return capsule_of(make_dlpack(std::move(range), std::move(shape), dtype, offset_bytes));
}

}  // namespace

PYBIND11_MODULE(sgl_vmm, m) {
  m.doc() = "Virtual expert tensors: pages, slots and handles on host, CUDA and Ascend memory.";
  add_errors(m);

  py::class_<Handle>(m, "Handle").def_readonly("value", &Handle::value);
  py::class_<Exported>(m, "Exported")
      .def(py::init([](int fd, std::uint64_t key, std::size_t num_bytes) {
             return Exported{fd, key, num_bytes};
           }), arg("fd"), arg("key"), arg("num_bytes"))
      .def_readonly("fd", &Exported::fd)
      .def_readonly("key", &Exported::key)
      .def_readonly("num_bytes", &Exported::num_bytes);

  py::class_<Backend, BackendPtr>(m, "Backend")
      .def_property_readonly("name", &Backend::name)
      .def_property_readonly("device_id", &Backend::device_id)
      .def_property_readonly("granularity", &Backend::granularity)
      .def_property_readonly("resident_bytes", &Backend::resident_bytes)
      .def("reserve", &Backend::reserve, arg("num_bytes"), arg("alignment"), release_gil())
      .def("release", &Backend::release, arg("address"), arg("num_bytes"), release_gil())
      .def("create", &Backend::create, arg("num_bytes"), release_gil())
      .def("destroy", &Backend::destroy, arg("handle"), release_gil())
      .def("map", &Backend::map, arg("address"), arg("num_bytes"), arg("handle"), release_gil())
      .def("unmap", &Backend::unmap, arg("address"), arg("num_bytes"), release_gil())
      .def("set_access", &Backend::set_access, arg("address"), arg("num_bytes"), release_gil())
      .def("map_run", &Backend::map_run, arg("address"), arg("page_bytes"), arg("handles"), release_gil())
      .def("export_handle", &Backend::export_handle, arg("handle"), release_gil())
      .def("import_handle", &Backend::import_handle, arg("exported"), release_gil())
      .def("copy", &Backend::copy, arg("destination"), arg("source"), arg("num_bytes"),
           release_gil())
      .def("peek", &peek, arg("address"), arg("num_bytes"))
      .def("poke", &poke, arg("address"), arg("data"));

  m.def("open_backend",
        [](const std::string& name, int device_id, std::size_t page_bytes,
           std::size_t capacity_bytes, bool populate, const std::string& library) {
          return open_backend(name, {device_id, page_bytes, capacity_bytes, populate, library});
        },
        arg("name"), py::kw_only(), arg("device_id") = BackendOptions().device_id,
        arg("page_bytes") = BackendOptions().page_bytes,
        arg("capacity_bytes") = BackendOptions().capacity_bytes,
        arg("populate") = BackendOptions().populate, arg("library") = "", release_gil());

  py::class_<PoolState>(m, "PoolState")
      .def_readonly("page_bytes", &PoolState::page_bytes)
      .def_readonly("max_pages", &PoolState::max_pages)
      .def_readonly("num_pages", &PoolState::num_pages)
      .def_readonly("num_free", &PoolState::num_free)
      .def_readonly("num_used", &PoolState::num_used)
      .def_readonly("peak_used", &PoolState::peak_used)
      .def_readonly("num_created", &PoolState::num_created)
      .def_readonly("num_destroyed", &PoolState::num_destroyed);
  py::class_<PagePool, std::shared_ptr<PagePool>>(m, "PagePool")
      .def(py::init(&make_pool), arg("backend"), py::kw_only(), arg("page_bytes") = py::none(),
           arg("budget_bytes") = py::none(), arg("min_free_pages") = 0,
           arg("max_free_pages") = py::none(), release_gil())
      .def("set_budget",
           [](PagePool& pool, std::size_t budget_bytes) {
             pool.set_max_pages(budget_bytes / pool.page_bytes());
           },
           arg("budget_bytes"), release_gil())
      .def("preallocate", &PagePool::preallocate, arg("num_free"), release_gil())
      .def("trim", &PagePool::trim, arg("num_free"), release_gil())
      .def("state", &PagePool::state, release_gil())
      .def("check_integrity", &PagePool::check_integrity, release_gil());

  py::class_<TensorState>(m, "TensorState")
      .def_readonly("slot_bytes", &TensorState::slot_bytes)
      .def_readonly("num_slots", &TensorState::num_slots)
      .def_readonly("num_mapped_slots", &TensorState::num_mapped_slots)
      .def_readonly("reserved_bytes", &TensorState::reserved_bytes)
      .def_readonly("num_pages", &TensorState::num_pages)
      .def_readonly("num_shared_pages", &TensorState::num_shared_pages);
  py::class_<VirtualTensor, std::shared_ptr<VirtualTensor>>(m, "VirtualTensor")
      .def(py::init<std::shared_ptr<PagePool>, std::size_t, std::size_t>(), arg("pool"),
           arg("num_slots"), arg("slot_bytes"), release_gil())
      .def_property_readonly("address", &VirtualTensor::address)
      .def_property_readonly("page_bytes", &VirtualTensor::page_bytes)
      .def("map_slots", &VirtualTensor::map_slots, arg("first"), arg("count"), release_gil())
      .def("unmap_slots", &VirtualTensor::unmap_slots, arg("first"), arg("count"), release_gil())
      .def("num_missing_pages", &VirtualTensor::num_missing_pages, arg("first"), arg("count"), release_gil())
      .def("is_mapped", &VirtualTensor::is_mapped, arg("slot"), release_gil())
      .def("state", &VirtualTensor::state, release_gil())
      .def("page_refs", &VirtualTensor::page_refs, release_gil())
      .def("page_handles", &VirtualTensor::page_handles, release_gil())
      .def("mapped_slots", &VirtualTensor::mapped_slots, release_gil())
      .def("check_integrity", &VirtualTensor::check_integrity, release_gil())
      .def("to_dlpack", &tensor_to_dlpack, arg("shape"), arg("dtype"));

  py::class_<AddressRange, std::shared_ptr<AddressRange>>(m, "AddressRange")
      .def(py::init(&make_range), arg("backend"), arg("num_bytes"), py::kw_only(),
           arg("page_bytes") = py::none(), release_gil())
      .def_property_readonly("address", &AddressRange::address)
      .def_property_readonly("num_bytes", &AddressRange::num_bytes)
      .def_property_readonly("page_bytes", &AddressRange::page_bytes)
      .def("map", &AddressRange::map, arg("first_page"), arg("handles"), release_gil())
      .def("unmap", &AddressRange::unmap, arg("first_page"), arg("count"), release_gil())
      .def("mapped_pages", &AddressRange::mapped_pages, release_gil())
      .def("to_dlpack", &range_to_dlpack, arg("shape"), arg("dtype"), arg("offset_bytes") = 0);

  m.def("send_page", &send_page, arg("socket_fd"), arg("exported"), release_gil());
  m.def("receive_page", &receive_page, arg("socket_fd"), release_gil());
}
