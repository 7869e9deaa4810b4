#include "tests/simulators/simulator.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace simulator {
namespace {

constexpr std::uint64_t kMagic = 0x73676c5f766d6d31;  // "sgl_vmm1"
constexpr int kMaxNumPids = 64;

// The page behind each memory, read and written through the descriptor.
struct Label {
  std::uint64_t magic = kMagic;
  std::uint64_t num_bytes = 0;
  std::int32_t device_id = 0;
  std::int32_t allows_everyone = 0;
  std::int32_t num_pids = 0;
  std::int32_t pids[kMaxNumPids] = {};
};
static_assert(sizeof(Label) <= kHostPageBytes);

bool read_label(int fd, std::size_t offset, Label* label) {
  return pread(fd, label, sizeof(*label), static_cast<off_t>(offset)) == sizeof(*label) &&
         label->magic == kMagic && label->num_bytes == offset;
}

bool write_label(int fd, const Label& label) {
  const auto offset = static_cast<off_t>(label.num_bytes);
  return pwrite(fd, &label, sizeof(label), offset) == sizeof(label);
}

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

bool make_inaccessible(Address address, std::size_t num_bytes) {
  return mmap(pointer(address), num_bytes, PROT_NONE,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED;
}

}  // namespace

Memory::Memory(int fd_, std::size_t num_bytes_, int device_id_, bool is_imported_)
    : fd(fd_), num_bytes(num_bytes_), device_id(device_id_), is_imported(is_imported_) {
  if (!is_imported) state().used_bytes += num_bytes;
}

Memory::~Memory() {
  if (!is_imported) state().used_bytes -= num_bytes;
  close(fd);
}

std::shared_ptr<Memory> Memory::create(std::size_t num_bytes, int device_id) {
  const int fd = memfd_create("simulated device memory", MFD_CLOEXEC);
  if (fd < 0) return nullptr;
  Label label;
  label.num_bytes = num_bytes;
  label.device_id = device_id;
  if (ftruncate(fd, static_cast<off_t>(num_bytes + kHostPageBytes)) || !write_label(fd, label)) {
    close(fd);
    return nullptr;
  }
  return std::shared_ptr<Memory>(new Memory(fd, num_bytes, device_id, false));
}

std::shared_ptr<Memory> Memory::import(int fd) {
  struct stat status {};
  if (fstat(fd, &status) || !S_ISREG(status.st_mode)) return nullptr;
  const auto file_bytes = static_cast<std::size_t>(status.st_size);
  Label label;
  if (file_bytes <= kHostPageBytes || !read_label(fd, file_bytes - kHostPageBytes, &label)) {
    return nullptr;
  }
  const int own_fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own_fd < 0) return nullptr;
  return std::shared_ptr<Memory>(new Memory(own_fd, label.num_bytes, label.device_id, true));
}

int Memory::duplicate_fd() const { return fcntl(fd, F_DUPFD_CLOEXEC, 0); }

void Memory::allow_everyone() {
  Label label;
  if (!read_label(fd, num_bytes, &label)) return;
  label.allows_everyone = 1;
  write_label(fd, label);
}

bool Memory::allow(const std::vector<std::int32_t>& pids) {
  Label label;
  if (!read_label(fd, num_bytes, &label)) return false;
  if (label.num_pids + pids.size() > kMaxNumPids) return false;
  for (const std::int32_t pid : pids) label.pids[label.num_pids++] = pid;
  return write_label(fd, label);
}

bool Memory::allows(pid_t pid) const {
  Label label;
  if (!read_label(fd, num_bytes, &label)) return false;
  const auto* pids = label.pids;
  return label.allows_everyone || std::count(pids, pids + label.num_pids, pid) > 0;
}

Address AddressSpace::reserve(std::size_t num_bytes, std::size_t alignment, std::uint64_t flags) {
  alignment = std::max(alignment, kHostPageBytes);
  const std::size_t room = num_bytes + alignment;
  void* start = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return 0;
  const auto low = reinterpret_cast<Address>(start);
  const Address address = (low + alignment - 1) / alignment * alignment;
  const Address end = (address + num_bytes + kHostPageBytes - 1) / kHostPageBytes * kHostPageBytes;
  if (address > low) munmap(start, address - low);
  if (low + room > end) munmap(pointer(end), low + room - end);
  reservations_[address] = Reservation{num_bytes, flags};
  return address;
}

bool AddressSpace::release(Address address) {
  const auto found = reservations_.find(address);
  if (found == reservations_.end() || has_mapping(address, found->second.num_bytes)) return false;
  munmap(pointer(address), found->second.num_bytes);
  reservations_.erase(found);
  return true;
}

const std::pair<const Address, Reservation>* AddressSpace::reservation_of(
    Address address, std::size_t num_bytes) const {
  const auto after = reservations_.upper_bound(address);
  if (after == reservations_.begin()) return nullptr;
  const auto& entry = *std::prev(after);
  const std::size_t size = entry.second.num_bytes;
  const bool is_inside = num_bytes <= size && address - entry.first <= size - num_bytes;
  return is_inside ? &entry : nullptr;
}

bool AddressSpace::has_mapping(Address address, std::size_t num_bytes) const {
  return std::any_of(mappings_.begin(), mappings_.end(), [&](const auto& entry) {
    return entry.first < address + num_bytes && address < entry.first + entry.second.num_bytes;
  });
}

bool AddressSpace::is_whole_run(Address address, std::size_t num_bytes) const {
  const Address end = address + num_bytes;
  Address next = address;
  while (next < end) {
    const auto mapping = mappings_.find(next);
    if (mapping == mappings_.end()) return false;
    next += mapping->second.num_bytes;
  }
  return num_bytes && next == end;
}

bool AddressSpace::map(Address address, std::size_t num_bytes, std::shared_ptr<Memory> memory,
                       int access) {
  if (mmap(pointer(address), num_bytes, access, MAP_SHARED | MAP_FIXED, memory->fd, 0) ==
      MAP_FAILED) {
    make_inaccessible(address, num_bytes);
    return false;
  }
  Mapping& mapping = mappings_[address];
  mapping = Mapping{num_bytes, std::move(memory)};
  mapping.access.fill(access);
  return true;
}

void AddressSpace::unmap(Address address, std::size_t num_bytes) {
  make_inaccessible(address, num_bytes);
  mappings_.erase(mappings_.lower_bound(address), mappings_.lower_bound(address + num_bytes));
}

bool AddressSpace::set_access(Address address, std::size_t num_bytes, int device_id, int access) {
  const auto end = mappings_.lower_bound(address + num_bytes);
  for (auto entry = mappings_.lower_bound(address); entry != end; ++entry) {
    Mapping& mapping = entry->second;
    mapping.access[static_cast<std::size_t>(device_id)] = access;
    int of_all = PROT_NONE;
    for (const int each : mapping.access) of_all |= each;
    if (mprotect(pointer(entry->first), mapping.num_bytes, of_all) != 0) return false;
  }
  return true;
}

bool AddressSpace::may_access(Address address, std::size_t num_bytes, int device_id,
                              int access) const {
  const Address end = address + num_bytes;
  while (address < end) {
    const auto after = mappings_.upper_bound(address);
    if (after == mappings_.begin()) return false;
    const auto& [start, mapping] = *std::prev(after);
    if (start + mapping.num_bytes <= address) return false;
    if ((mapping.access[static_cast<std::size_t>(device_id)] & access) != access) return false;
    address = start + mapping.num_bytes;
  }
  return true;
}

void AddressSpace::clear() {
  mappings_.clear();
  for (const auto& [address, reservation] : reservations_) {
    munmap(pointer(address), reservation.num_bytes);
  }
  reservations_.clear();
}

std::uint64_t State::add_handle(std::shared_ptr<Memory> memory) {
  next_handle += 0x10;
  handles[next_handle] = std::move(memory);
  return next_handle;
}

std::shared_ptr<Memory> State::memory_of(std::uint64_t handle) const {
  const auto found = handles.find(handle);
  return found == handles.end() ? nullptr : found->second;
}

bool State::has_room(std::size_t num_bytes) const {
  return !total_bytes || (num_bytes <= total_bytes && used_bytes <= total_bytes - num_bytes);
}

bool State::is_mapped(const Memory& memory) const {
  const auto& mappings = space.mappings();
  return std::any_of(mappings.begin(), mappings.end(),
                     [&](const auto& entry) { return entry.second.memory.get() == &memory; });
}

bool State::drop_handle(std::uint64_t handle) {
  const std::shared_ptr<Memory> memory = memory_of(handle);
  if (!memory) return false;
  if (is_mapped(*memory)) ++num_deferred_releases;
  handles.erase(handle);
  exported_keys.erase(handle);
  imported_keys.erase(handle);
  return true;
}

State& state() {
  static State* const kept_for_exit_handlers = new State;
  return *kept_for_exit_handlers;
}

Call::Call(const char* name) : lock_(state().mutex) {
  ++state().counts[name];
  auto& faults = state().faults;
  for (Fault& fault : faults) {
    if (fault.call == name && --fault.calls_left == 0) fault_ = fault.code;
  }
  faults.erase(std::remove_if(faults.begin(), faults.end(),
                              [](const Fault& fault) { return fault.calls_left == 0; }),
               faults.end());
}

}  // namespace simulator

using simulator::state;

// The n-th next call of `call` does nothing and returns `code`; 1 is the very next.
SIM_EXPORT void sim_fail(const char* call, int nth, int code) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().faults.push_back({call, nth, code});
}

// A fresh library: no handle, no mapping, no reservation, not initialised, no fault or counter, and
// the defaults of every sim_set_*. Only while no backend is open.
SIM_EXPORT void sim_reset() {
  const std::lock_guard<std::mutex> lock(state().mutex);
  auto& current = state();
  current.space.clear();
  current.handles.clear();
  current.exported_keys.clear();
  current.imported_keys.clear();
  current.num_context_owners = {};
  current.pending_copies.clear();
  current.faults.clear();
  current.counts.clear();
  current.granularity = std::size_t{2} << 20;
  current.has_vmm = current.has_fd_export = true;
  current.total_bytes = 0;
  current.num_deferred_releases = 0;
  current.is_initialized = false;
  ++current.generation;
}

// Calls so far, refused ones among them.
SIM_EXPORT int sim_count(const char* call) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return state().counts[call];
}

SIM_EXPORT int sim_live_handles() {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return static_cast<int>(state().handles.size());
}

SIM_EXPORT int sim_live_mappings() {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return static_cast<int>(state().space.mappings().size());
}

SIM_EXPORT int sim_live_reservations() {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return static_cast<int>(state().space.reservations().size());
}

// Bytes of memory that was created here and is not freed: by a handle or by a mapping.
SIM_EXPORT std::size_t sim_used_bytes() {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return state().used_bytes;
}

// Handles that were released while mapped, which both vendors put off until the last unmap.
SIM_EXPORT int sim_deferred_releases() {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return state().num_deferred_releases;
}

SIM_EXPORT void sim_set_granularity(std::size_t num_bytes) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().granularity = num_bytes;
}

SIM_EXPORT void sim_set_vmm_supported(int is_supported) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().has_vmm = is_supported != 0;
}

// cuda only: a device whose memory cannot become a file descriptor.
SIM_EXPORT void sim_set_fd_export_supported(int is_supported) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().has_fd_export = is_supported != 0;
}

// Of the whole library, not of each device; 0 = without a limit.
SIM_EXPORT void sim_set_memory(std::size_t total_bytes) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().total_bytes = total_bytes;
}
