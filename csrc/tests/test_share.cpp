// share.cpp and export, import: pages between two processes, and messages that are none.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/uio.h>

#include "share.h"
#include "tests/support.h"

using namespace support;

namespace {

Address map_new(Backend& backend, Handle handle, std::size_t num_bytes = kPage) {
  const Address address = backend.reserve(num_bytes, num_bytes);
  backend.map(address, num_bytes, handle);
  backend.set_access(address, num_bytes);
  return address;
}

bool holds(Address address, std::size_t seed) {
  return !std::memcmp(bytes_at(address), pattern(seed, kPage), kPage);
}

void write_page(Address address, std::size_t seed) {
  std::memcpy(bytes_at(address), pattern(seed, kPage), kPage);
}

void say(int socket) { CHECK_EQ(write(socket, "x", 1), ssize_t{1}); }
void hear(int socket) {
  char byte;
  CHECK_EQ(read(socket, &byte, 1), ssize_t{1});
}

void send_handle(Backend& backend, int socket, Handle handle) {
  const Exported exported = backend.export_handle(handle);
  send_page(socket, exported);
  if (exported.fd >= 0) close(exported.fd);
}

// Sends a page to a child; each writes, and sees what the other wrote.
void check_two_processes(const std::function<BackendPtr()>& open) {
  const int status = run_in_child(
      [&](int socket) {
        const BackendPtr backend = open();
        const Handle imported = backend->import_handle(receive_page(socket));
        const Address address = map_new(*backend, imported);
        CHECK(holds(address, 1));
        write_page(address, 2);
        say(socket);
        hear(socket);
        CHECK(holds(address, 3));
        backend->unmap(address, kPage);
        backend->destroy(imported);  // the exporter's page is not touched by this
        say(socket);
        hear(socket);
      },
      [&](int socket) {
        const BackendPtr backend = open();
        const Handle page = backend->create(kPage);
        const Address address = map_new(*backend, page);
        write_page(address, 1);
        send_handle(*backend, socket, page);
        hear(socket);
        CHECK(holds(address, 2));
        write_page(address, 3);
        say(socket);
        hear(socket);
        CHECK(holds(address, 3));
        backend->unmap(address, kPage);
        backend->destroy(page);
        say(socket);
      });
  CHECK_EQ(status, 0);
}

struct Sockets {
  Sockets() { CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0); }
  ~Sockets() {
    close(ends[0]);
    close(ends[1]);
  }
  void hang_up() {
    close(ends[1]);
    ends[1] = -1;
  }
  int ends[2];
};

// A page message as its layout says (share.cpp), with as many descriptors as wanted.
void send_raw(int socket, std::vector<std::uint64_t> record, const std::vector<int>& fds) {
  iovec part{record.data(), record.size() * sizeof(std::uint64_t)};
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
  }
  CHECK(sendmsg(socket, &message, 0) > 0);
}

constexpr std::uint64_t kMagic = 0x31304d4d564c4753;

int make_memfd(std::size_t num_bytes, int seals) {
  const int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(num_bytes)) == 0);
  CHECK_EQ(fcntl(fd, F_ADD_SEALS, seals), 0);
  return fd;
}

}  // namespace

TEST(two_processes_see_each_others_writes_on_the_host) {
  for (const bool populate : {true, false}) {
    check_two_processes([populate] { return open_host_pages(4, kPage, populate); });
  }
}

TEST(two_processes_see_each_others_writes_over_the_simulators) {
  for_each_vendor([](const Vendor& vendor) {
    check_two_processes([&] {
      vendor.reset();
      return vendor.open();
    });
  });
}

TEST(an_imported_page_outlives_the_process_that_made_it) {
  int status = -1;
  Sockets sockets;
  status = run_in_child([&](int) {
    const BackendPtr host = open_host_pages(4);
    const Handle page = host->create(kPage);
    write_page(map_new(*host, page), 7);
    send_handle(*host, sockets.ends[1], page);
  });
  CHECK_EQ(status, 0);
  const BackendPtr host = open_host_pages(4);
  CHECK(holds(map_new(*host, host->import_handle(receive_page(sockets.ends[0]))), 7));
}

TEST(sending_to_a_dead_peer_says_so) {
  const BackendPtr host = open_host_pages(1);
  const Exported exported = host->export_handle(host->create(kPage));
  Sockets sockets;
  sockets.hang_up();
  CHECK_THROWS(kPeerGone, send_page(sockets.ends[0], exported));
  CHECK_THROWS(kPeerGone, receive_page(sockets.ends[0]));
  close(exported.fd);
}

TEST(a_peer_that_dies_before_it_sends_says_so) {
  run_in_child([](int) {}, [](int socket) { CHECK_THROWS(kPeerGone, receive_page(socket)); });
}

TEST(a_socket_that_is_none_is_the_calls_error) {
  CHECK_THROWS(kVendorCall, send_page(-1, Exported{}));
  CHECK_THROWS(kVendorCall, receive_page(-1));
}

TEST(many_pages_come_in_the_order_they_were_sent) {
  constexpr std::size_t kNumPages = 40;
  const int status = run_in_child(
      [](int socket) {
        const BackendPtr host = open_host_pages(1);
        for (std::size_t i = 0; i < kNumPages; ++i) {
          CHECK(holds(map_new(*host, host->import_handle(receive_page(socket))), i));
        }
      },
      [](int socket) {
        const BackendPtr host = open_host_pages(kNumPages);
        for (std::size_t i = 0; i < kNumPages; ++i) {
          const Handle page = host->create(kPage);
          write_page(map_new(*host, page), i);
          send_handle(*host, socket, page);
        }
        char byte;
        CHECK_EQ(read(socket, &byte, 1), ssize_t{0});  // until the child has seen them all
      });
  CHECK_EQ(status, 0);
}

TEST(messages_that_send_page_did_not_write_are_refused_and_leak_nothing) {
  Sockets sockets;
  const std::size_t num_fds = count_fds();
  const auto refuse = [&](const std::vector<std::uint64_t>& record, const std::vector<int>& fds) {
    send_raw(sockets.ends[1], record, fds);
    CHECK_THROWS(kInvalidArgument, receive_page(sockets.ends[0]));
    CHECK_EQ(count_fds(), num_fds);
  };
  refuse({kMagic + 1, 0, 0, kPage}, {});
  refuse({kMagic + 1, 1, 0, kPage}, {0});
  refuse({kMagic, 1, 0, kPage}, {});         // a descriptor is promised
  refuse({kMagic, 0, 0, kPage}, {0});        // none is
  refuse({kMagic, 1, 0, kPage}, {0, 0});     // one is
  refuse({kMagic, 0, 0, kPage}, {0, 0});
  refuse({kMagic, 1, 0, kPage}, {0, 0, 0, 0});
  send_raw(sockets.ends[1], {kMagic, 1}, {0});
  sockets.hang_up();
  CHECK_THROWS(kInvalidArgument, receive_page(sockets.ends[0]));  // cut short
  CHECK_EQ(count_fds(), num_fds - 1);
}

TEST(descriptors_that_are_no_pages_are_refused_and_stay_the_callers) {
  const BackendPtr host = open_host_pages(4);
  const int sealed = make_memfd(4 * kPage, F_SEAL_SHRINK);
  const int unsealed = make_memfd(4 * kPage, 0);
  const int too_short = make_memfd(kPage / 2, F_SEAL_SHRINK);
  const int plain = open("/dev/null", O_RDWR | O_CLOEXEC);
  const std::size_t num_fds = count_fds();
  const auto refuse = [&](const Exported& exported) {
    CHECK_THROWS(kInvalidArgument, host->import_handle(exported));
  };
  refuse({unsealed, 0, kPage});
  refuse({too_short, 0, kPage});
  refuse({plain, 0, kPage});
  refuse({-1, 0, kPage});
  refuse({sealed, 4 * kPage, kPage});  // behind its end
  refuse({sealed, ~std::uint64_t{0} - kPage + 1, kPage});
  refuse({sealed, kPage / 2, kPage});
  refuse({sealed, 0, 2 * kPage});
  refuse({sealed, 0, 0});
  CHECK_EQ(count_fds(), num_fds);
  for (const int fd : {unsealed, too_short, plain}) CHECK_EQ(close(fd), 0);
  const Handle imported = host->import_handle({sealed, 3 * kPage, kPage});  // takes it
  write_page(map_new(*host, imported), 1);
}

TEST(an_arena_costs_one_descriptor_however_many_of_its_pages_are_imported) {
  const BackendPtr exporter = open_host_pages(8);
  const BackendPtr importer = open_host_pages(1);
  std::vector<Handle> pages;
  for (int i = 0; i < 8; ++i) pages.push_back(exporter->create(kPage));
  const std::size_t num_fds = count_fds();
  std::vector<Handle> imported;
  for (std::size_t i = 0; i < 800; ++i) {
    imported.push_back(importer->import_handle(exporter->export_handle(pages[i % 8])));
    CHECK_EQ(count_fds(), num_fds + 1);
  }
  for (const Handle handle : imported) importer->destroy(handle);
  CHECK_EQ(count_fds(), num_fds);
}

TEST(imported_and_own_pages_lie_beside_each_other_on_the_host) {
  const BackendPtr exporter = open_host_pages(4);
  const BackendPtr importer = open_host_pages(4);
  std::vector<Handle> theirs;
  std::vector<Handle> run;
  for (std::size_t i = 0; i < 2; ++i) {
    theirs.push_back(exporter->create(kPage));
    write_page(map_new(*exporter, theirs[i]), 10 + i);
    run.push_back(importer->import_handle(exporter->export_handle(theirs[i])));
    run.push_back(importer->create(kPage));
  }
  const Address address = importer->reserve(4 * kPage, kPage);
  importer->map_run(address, kPage, run);
  write_page(address + kPage, 20);
  write_page(address + 3 * kPage, 21);
  CHECK(holds(address, 10) && holds(address + kPage, 20) && holds(address + 2 * kPage, 11));
  for (std::size_t i = 0; i < 4; ++i) importer->unmap(address + i * kPage, kPage);
  importer->map_run(address, kPage, {run[3], run[2], run[1], run[0]});
  CHECK(holds(address, 21) && holds(address + kPage, 11) && holds(address + 3 * kPage, 10));
}
