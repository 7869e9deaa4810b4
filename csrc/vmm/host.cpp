// Host memory as a device: one memfd is the physical memory, its pages are the handles.
//
//   memfd  [ page 0 | page 1 | ... ]      sparse, sealed against shrinking and growing
//   home   [   VA   |   VA   | ... ]      the whole memfd, mapped once, private to this backend
//
// A page that is mapped nowhere has its page tables at home. With `populate`, create fills both at
// once (MADV_POPULATE_WRITE), map moves the page tables from home to the wanted address (mremap) and
// unmap moves them back: no page is faulted in twice. A second mapping of the same page, a page
// from another process, and everything without `populate` is mapped lazily.
//
// MREMAP_DONTUNMAP keeps the address range that is left: nobody else can be given it meanwhile.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <iterator>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <set>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <vector>

#include "vmm/backend.h"
#include "vmm/host_os.h"

namespace sgl_vmm {
namespace {

using namespace host_os;

constexpr int kReadWrite = PROT_READ | PROT_WRITE;
constexpr int kMove = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;
constexpr std::size_t kPagesPerFiller = 16;  // fewer are not worth another thread
constexpr std::size_t kMaxFillers = 15;      // beside the one that asks
constexpr int kMadvCollapse = 25;  // MADV_COLLAPSE, Linux 6.1; older headers do not have it
constexpr std::uint64_t kImportedBit = std::uint64_t{1} << 63;

// One piece of physical memory, ours or another process's.
struct Page {
  FilePtr file;
  std::size_t offset = 0;   // bytes into the file
  std::size_t num_maps = 0;
  Address moved_to = 0;     // where its page tables are; 0 = at home, or it has none
};

class HostBackend final : public Backend {
 public:
  explicit HostBackend(const BackendOptions& options)
      : page_bytes_(options.page_bytes), populate_(options.populate) {
    check_page_bytes();
    const std::size_t wanted =
        options.capacity_bytes ? options.capacity_bytes : memory_of_machine();
    num_pages_ = (wanted + page_bytes_ - 1) / page_bytes_;
    file_ = make_arena_file(num_pages_ * page_bytes_);
    home_ = reserve_aligned(num_pages_ * page_bytes_, page_bytes_);
    map_file(home_, num_pages_ * page_bytes_, *file_, 0, kReadWrite);
    madvise(pointer(home_), num_pages_ * page_bytes_, MADV_DONTDUMP);  // advice only
  }

  ~HostBackend() override {
    for (const auto& [address, num_bytes] : reserved_) munmap(pointer(address), num_bytes);
    munmap(pointer(home_), num_pages_ * page_bytes_);
  }

  const char* name() const override { return "host"; }
  DeviceType device_type() const override { return DeviceType::kCpu; }
  int device_id() const override { return 0; }
  std::size_t granularity() const override { return page_bytes_; }

  Address reserve(std::size_t num_bytes, std::size_t alignment) override {
    check_size(num_bytes);
    if (!is_power_of_two(alignment)) {
      refuse(ErrorKind::kInvalidArgument,
             "alignment " + std::to_string(alignment) + " is not a power of two");
    }
    const Address address = reserve_aligned(num_bytes, std::max(alignment, page_bytes_));
    const std::lock_guard<std::shared_mutex> lock(mutex_);
    reserved_[address] = num_bytes;
    return address;
  }

  void release(Address address, std::size_t num_bytes) override {
    const std::lock_guard<std::shared_mutex> lock(mutex_);
    const auto found = reserved_.find(address);
    if (found == reserved_.end() || found->second != num_bytes) {
      refuse(ErrorKind::kInvalidArgument, "release of a range that was not reserved as a whole");
    }
    const auto mapped = mapped_.lower_bound(address);
    if (mapped != mapped_.end() && mapped->first < address + num_bytes) {
      refuse(ErrorKind::kPageMapped, "release of a range in which a page is still mapped");
    }
    if (munmap(pointer(address), num_bytes) != 0) {
      VMM_HOST_FAILED("munmap", ErrorKind::kVendorCall);
    }
    reserved_.erase(found);
  }

  Handle create(std::size_t num_bytes) override {
    std::vector<Handle> created;
    create_run(num_bytes, 1, created);
    return created.front();
  }

  // All, or none.
  void create_run(std::size_t num_bytes, std::size_t count,
                  std::vector<Handle>& created) override {
    check_one_page(num_bytes);
    const std::lock_guard<std::shared_mutex> lock(mutex_);
    const std::vector<std::size_t> indices = lowest_free(count);
    created.reserve(created.size() + count);
    if (populate_) fill_all(indices);
    for (const std::size_t index : indices) {
      index < next_page_ ? void(free_.erase(index)) : void(++next_page_);
      pages_[index + 1] = Page{file_, index * page_bytes_};
      created.push_back(Handle{index + 1});
    }
  }

  void destroy(Handle handle) override {
    const std::lock_guard<std::shared_mutex> lock(mutex_);
    const Page& page = find(handle);
    if (page.num_maps > 0) {
      refuse(ErrorKind::kPageMapped, "a page that is still mapped cannot be destroyed");
    }
    if (page.file == file_) {
      if (!empty(page.offset)) {
        VMM_HOST_FAILED("fallocate(FALLOC_FL_PUNCH_HOLE)", ErrorKind::kVendorCall);
      }
      free_.insert(page.offset / page_bytes_);
    }
    pages_.erase(handle.value);
  }

  void map(Address address, std::size_t num_bytes, Handle handle) override {
    check_one_page(num_bytes);
    map_run(address, num_bytes, {handle});
  }

  void unmap(Address address, std::size_t num_bytes) override {
    check_one_page(num_bytes);
    const std::lock_guard<std::shared_mutex> lock(mutex_);
    unmap_locked(address);
  }

  void set_access(Address address, std::size_t num_bytes) override {
    check_size(num_bytes);
    const std::lock_guard<std::shared_mutex> lock(mutex_);
    for (Address at = address; at < address + num_bytes; at += page_bytes_) {
      if (!mapped_.count(at)) {
        refuse(ErrorKind::kInvalidArgument, "access to a range that is not wholly mapped");
      }
    }
    if (mprotect(pointer(address), num_bytes, kReadWrite) != 0) {
      VMM_HOST_FAILED("mprotect", kind_of_errno());
    }
  }

  // As the base class says, but consecutive pages of the memfd cost one system call.
  void map_run(Address address, std::size_t page_bytes,
               const std::vector<Handle>& handles) override {
    check_one_page(page_bytes);
    const std::lock_guard<std::shared_mutex> lock(mutex_);
    check_unmapped(address, handles.size() * page_bytes);
    for (const Handle handle : handles) find(handle);
    std::size_t done = 0;
    try {
      while (done < handles.size()) done += map_consecutive(address, handles, done);
    } catch (const VmmError&) {
      while (done > 0) {
        try {
          unmap_locked(address + --done * page_bytes_);
        } catch (const VmmError&) {  // stays mapped, as backend.h says
        }
      }
      throw;
    }
  }

  Exported export_handle(Handle handle) override {
    const std::lock_guard<std::shared_mutex> lock(mutex_);
    const Page& page = find(handle);
    const int fd = fcntl(page.file->get(), F_DUPFD_CLOEXEC, 0);
    if (fd < 0) VMM_HOST_FAILED("fcntl(F_DUPFD_CLOEXEC)", ErrorKind::kVendorCall);
    return Exported{fd, page.offset, page_bytes_};
  }

  Handle import_handle(const Exported& exported) override {
    struct stat info;
    if (fstat(exported.fd, &info) != 0) VMM_HOST_FAILED("fstat", ErrorKind::kInvalidArgument);
    // An unsealed file could be cut short by its owner, and a read would then end this process.
    const int seals = fcntl(exported.fd, F_GET_SEALS);
    const auto size = static_cast<std::size_t>(info.st_size);
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || exported.num_bytes != page_bytes_ ||
        exported.key % page_bytes_ != 0 || exported.key > size || size - exported.key < page_bytes_) {
      refuse(ErrorKind::kInvalidArgument,
             "not a page of " + std::to_string(page_bytes_) + " bytes in a sealed memfd");
    }
    const std::lock_guard<std::shared_mutex> lock(mutex_);
    const std::uint64_t value = kImportedBit | ++num_imported_;
    pages_[value] = Page{imported_file(info, exported.fd), exported.key};
    return Handle{value};
  }

  void copy(Address destination, Address source, std::size_t num_bytes) override {
    const std::shared_lock<std::shared_mutex> lock(mutex_);
    check_covered(destination, num_bytes);
    check_covered(source, num_bytes);
    if (ranges_overlap(destination, source, num_bytes)) {
      refuse(ErrorKind::kInvalidArgument, "a copy onto itself");
    }
    std::memcpy(pointer(destination), pointer(source), num_bytes);
  }

  std::optional<std::size_t> resident_bytes() const override {
    struct stat info;
    if (fstat(file_->get(), &info) != 0) return std::nullopt;
    return static_cast<std::size_t>(info.st_blocks) * 512;
  }

 protected:
  void read(void* host, Address source, std::size_t num_bytes) override {
    const std::shared_lock<std::shared_mutex> lock(mutex_);
    check_covered(source, num_bytes);
    std::memcpy(host, pointer(source), num_bytes);
  }

  void write(Address destination, const void* host, std::size_t num_bytes) override {
    const std::shared_lock<std::shared_mutex> lock(mutex_);
    check_covered(destination, num_bytes);
    std::memcpy(pointer(destination), host, num_bytes);
  }

 private:
  void check_page_bytes() const {
    const auto system_page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    if (!is_power_of_two(page_bytes_)) {
      refuse(ErrorKind::kBadGranularity,
             "page size " + std::to_string(page_bytes_) + " bytes is not a power of two");
    }
    if (page_bytes_ < system_page) {
      refuse(ErrorKind::kBadGranularity, "page size " + std::to_string(page_bytes_) +
                                             " bytes is below the system's " +
                                             std::to_string(system_page));
    }
  }

  void check_size(std::size_t num_bytes) const {
    if (num_bytes == 0 || num_bytes % page_bytes_ != 0) {
      refuse(ErrorKind::kInvalidArgument, std::to_string(num_bytes) +
                                              " bytes are not a multiple of the page size " +
                                              std::to_string(page_bytes_));
    }
  }

  void check_one_page(std::size_t num_bytes) const {
    if (num_bytes != page_bytes_) {
      refuse(ErrorKind::kInvalidArgument, "a handle is one page of " +
                                              std::to_string(page_bytes_) + " bytes, not " +
                                              std::to_string(num_bytes));
    }
  }

  Page& find(Handle handle) {
    const auto found = pages_.find(handle.value);
    if (found == pages_.end()) refuse(ErrorKind::kInvalidArgument, "no such handle");
    return found->second;
  }

  void check_unmapped(Address address, std::size_t num_bytes) const {
    const auto after = reserved_.upper_bound(address);
    const auto range = after == reserved_.begin() ? reserved_.end() : std::prev(after);
    if (range == reserved_.end() || address % page_bytes_ != 0 ||
        range->first + range->second < address + num_bytes) {
      refuse(ErrorKind::kInvalidArgument, "map outside a reserved range");
    }
    const auto mapped = mapped_.lower_bound(address);
    if (mapped != mapped_.end() && mapped->first < address + num_bytes) {
      refuse(ErrorKind::kInvalidArgument, "map over a mapped page");
    }
  }

  // Every byte lies in a mapped page.
  void check_covered(Address address, std::size_t num_bytes) const {
    const Address end = address + num_bytes;
    Address next = address / page_bytes_ * page_bytes_;
    for (auto page = mapped_.find(next); page != mapped_.end() && page->first == next && next < end;
         ++page) {
      next += page_bytes_;
    }
    if (end <= address || next < end) {  // at once: no bytes, or more than addresses
      refuse(ErrorKind::kInvalidArgument,
             "a range of " + std::to_string(num_bytes) + " bytes is not wholly mapped");
    }
  }

  // Pages of the memfd that no handle is for.
  std::vector<std::size_t> lowest_free(std::size_t count) const {
    const std::size_t num_left = free_.size() + num_pages_ - next_page_;
    if (count > num_left) {
      refuse(ErrorKind::kExhausted, std::to_string(count) + " pages of " +
                                        std::to_string(page_bytes_) + " bytes are wanted, and " +
                                        std::to_string(num_left) + " of " +
                                        std::to_string(num_pages_) + " are not in use");
    }
    std::vector<std::size_t> found;
    for (auto at = free_.begin(); at != free_.end() && found.size() < count; ++at) {
      found.push_back(*at);
    }
    for (std::size_t next = next_page_; found.size() < count; ++next) found.push_back(next);
    return found;
  }

  // All of these, or none, by as many threads as may run: the system zeroes a page at a time.
  void fill_all(const std::vector<std::size_t>& indices) const {
    std::atomic<std::size_t> next{0};
    std::exception_ptr failure;
    std::mutex of_failure;
    const auto fill_some = [&] {
      for (std::size_t i = next++; i < indices.size(); i = next++) {
        try {
          fill(home_ + indices[i] * page_bytes_);
        } catch (const VmmError&) {
          const std::lock_guard<std::mutex> lock(of_failure);
          failure = std::current_exception();
          next = indices.size();
        }
      }
    };
    std::vector<std::thread> others = fillers(indices.size() / kPagesPerFiller, fill_some);
    fill_some();
    for (std::thread& other : others) other.join();
    if (failure) {
      for (const std::size_t index : indices) empty(index * page_bytes_);
      std::rethrow_exception(failure);
    }
  }

  // Threads beside this one; where the system gives no more of them, fewer.
  template <typename Work>
  static std::vector<std::thread> fillers(std::size_t wanted, const Work& work) {
    const std::size_t num_cores = std::max(1u, std::thread::hardware_concurrency());
    std::vector<std::thread> started;
    try {
      while (started.size() < std::min({wanted, num_cores - 1, kMaxFillers})) {
        started.emplace_back(work);
      }
    } catch (const std::system_error&) {
    }
    return started;
  }

  // Memory and page tables for one page at home, zeroed.
  void fill(Address home) const {
    for (Address at = home; at + kHugePageBytes <= home + page_bytes_; at += kHugePageBytes) {
      collapse(at);
    }
    if (madvise(pointer(home), page_bytes_, MADV_POPULATE_WRITE) != 0) {
      const int failure = errno;
      empty(home - home_);  // what was filled before the failure
      errno = failure;
      VMM_HOST_FAILED("madvise(MADV_POPULATE_WRITE)", ErrorKind::kExhausted);
    }
  }

  // Gives a page's memory back to the system. Returns whether it took it.
  bool empty(std::size_t offset) const {
    return fallocate(file_->get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                     static_cast<off_t>(offset), static_cast<off_t>(page_bytes_)) == 0;
  }

  // Tries to make 2 MiB one huge page: a tenth of the cost of 512 small ones, and fewer TLB misses
  // afterwards. Unlike faults it does not need shmem_enabled, which is mostly `never`; but it wants
  // one small page to be there. Where it fails, populating makes small pages.
  void collapse(Address address) const {
    const auto system_page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    if (madvise(pointer(address), system_page, MADV_POPULATE_WRITE) == 0) {
      madvise(pointer(address), kHugePageBytes, kMadvCollapse);
    }
  }

  bool is_at_home(const Page& page) const {
    return populate_ && page.file == file_ && page.moved_to == 0;
  }

  // Maps handles[first...] as far as one system call reaches. Returns how many it mapped.
  std::size_t map_consecutive(Address address, const std::vector<Handle>& handles,
                              std::size_t first) {
    const Page start = find(handles[first]);
    std::size_t count = 1;
    while (first + count < handles.size() && follows(start, find(handles[first + count]), count)) {
      ++count;
    }
    const Address at = address + first * page_bytes_;
    const bool moves = is_at_home(start);
    if (moves) {
      move_tables(home_ + start.offset, count * page_bytes_, at);
    } else {
      map_file(at, count * page_bytes_, *start.file, start.offset, kReadWrite);
    }
    for (std::size_t i = 0; i < count; ++i) note_mapped(at + i * page_bytes_, handles[first + i], moves);
    return count;
  }

  bool follows(const Page& start, const Page& next, std::size_t distance) const {
    return next.file == start.file && next.offset == start.offset + distance * page_bytes_ &&
           is_at_home(next) == is_at_home(start);
  }

  void note_mapped(Address address, Handle handle, bool moved) {
    Page& page = find(handle);
    mapped_[address] = handle;
    ++page.num_maps;
    if (moved) page.moved_to = address;
  }

  void unmap_locked(Address address) {
    const auto found = mapped_.find(address);
    if (found == mapped_.end()) {
      refuse(ErrorKind::kInvalidArgument, "unmap of a page that is not mapped");
    }
    Page& page = find(found->second);
    // Only the last mapping may take the tables home: they would leave another one empty-handed.
    if (page.moved_to == address && page.num_maps == 1) {
      move_tables(address, page_bytes_, home_ + page.offset);
    }
    reserve_range(page_bytes_, address);
    if (page.moved_to == address) page.moved_to = 0;
    --page.num_maps;
    mapped_.erase(found);
  }

  void map_file(Address address, std::size_t num_bytes, const FileDescriptor& file,
                std::size_t offset, int protection) {
    void* memory = mmap(pointer(address), num_bytes, protection, MAP_SHARED | MAP_FIXED,
                        file.get(), static_cast<off_t>(offset));
    if (memory == MAP_FAILED) explain_map_failure("mmap(MAP_FIXED)");
  }

  void move_tables(Address from, std::size_t num_bytes, Address to) {
    if (mremap(pointer(from), num_bytes, num_bytes, kMove, pointer(to)) == MAP_FAILED) {
      explain_map_failure("mremap");
    }
  }

  // ENOMEM of a mapping mostly means that the process has too many of them, not too little memory.
  [[noreturn]] void explain_map_failure(const char* call) const {
    if (errno == ENOMEM) {
      refuse(ErrorKind::kExhausted,
             std::string(call) + " -> ENOMEM: too many mappings; raise vm.max_map_count or the "
                                 "page size of " + std::to_string(page_bytes_) + " bytes");
    }
    VMM_HOST_FAILED(call, ErrorKind::kVendorCall);
  }

  // One descriptor for each foreign memfd, however many of its pages are imported.
  FilePtr imported_file(const struct stat& info, int fd) {
    std::weak_ptr<FileDescriptor>& known = imported_files_[{info.st_dev, info.st_ino}];
    if (FilePtr file = known.lock()) {
      close(fd);
      return file;
    }
    auto file = std::make_shared<FileDescriptor>(fd);
    known = file;
    return file;
  }

  const std::size_t page_bytes_;
  const bool populate_;
  std::size_t num_pages_ = 0;
  FilePtr file_;
  Address home_ = 0;

  mutable std::shared_mutex mutex_;  // guards everything below
  std::size_t next_page_ = 0;            // pages from here on were never created
  std::set<std::size_t> free_;           // created once and destroyed since, lowest first
  std::uint64_t num_imported_ = 0;
  std::unordered_map<std::uint64_t, Page> pages_;  // by handle
  std::map<Address, std::size_t> reserved_;        // start -> bytes
  std::map<Address, Handle> mapped_;               // page address -> its page
  std::map<std::pair<dev_t, ino_t>, std::weak_ptr<FileDescriptor>> imported_files_;
};

}  // namespace

BackendPtr open_host(const BackendOptions& options) {
  return std::make_shared<HostBackend>(options);
}

}  // namespace sgl_vmm
