#include "share.h"

#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#define VMM_SOCKET_FAILED(call)                                                                \
  throw VmmError(                                                                              \
      errno == EPIPE || errno == ECONNRESET ? ErrorKind::kPeerGone : ErrorKind::kVendorCall, \
      "socket", call, errno, strerrorname_np(errno), __FILE__, __LINE__)

namespace sgl_vmm {
namespace {

constexpr std::uint64_t kMagic = 0x31304d4d564c4753;  // "SGLVMM01"

struct Record {
  std::uint64_t magic;
  std::uint64_t has_fd;
  std::uint64_t key;
  std::uint64_t num_bytes;
};

union AncillaryFd {
  cmsghdr align;
  char bytes[CMSG_SPACE(sizeof(int))];
};

void close_received(const msghdr& message) {
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part;
       part = CMSG_NXTHDR(const_cast<msghdr*>(&message), part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t at = 0; at + CMSG_LEN(0) + sizeof(int) <= part->cmsg_len; at += sizeof(int)) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(part) + at, sizeof(int));
      close(fd);
    }
  }
}

// The one descriptor of a message, -1 if it has none.
int received_fd(const msghdr& message) {
  const cmsghdr* part = CMSG_FIRSTHDR(&message);
  if (!part || part->cmsg_type != SCM_RIGHTS || part->cmsg_len != CMSG_LEN(sizeof(int))) return -1;
  int fd;
  std::memcpy(&fd, CMSG_DATA(part), sizeof(int));
  return fd;
}

}  // namespace

void send_page(int socket_fd, const Exported& exported) {
  Record record{kMagic, exported.fd >= 0, exported.key, exported.num_bytes};
  iovec part{&record, sizeof(record)};
  AncillaryFd ancillary{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (exported.fd >= 0) {
    message.msg_control = ancillary.bytes;
    message.msg_controllen = sizeof(ancillary.bytes);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &exported.fd, sizeof(int));
  }
  ssize_t sent;
  do {
    sent = sendmsg(socket_fd, &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) VMM_SOCKET_FAILED("sendmsg");
  // 32 bytes do not fit partly into a Unix socket that accepted some of them, but be sure.
  if (sent != sizeof(record)) throw VmmError(ErrorKind::kPeerGone, "socket: a page was cut short");
}

Exported receive_page(int socket_fd) {
  Record record{};
  iovec part{&record, sizeof(record)};
  AncillaryFd ancillary{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = ancillary.bytes;
  message.msg_controllen = sizeof(ancillary.bytes);
  ssize_t received;
  do {
    received = recvmsg(socket_fd, &message, MSG_CMSG_CLOEXEC | MSG_WAITALL);
  } while (received < 0 && errno == EINTR);
  if (received < 0) VMM_SOCKET_FAILED("recvmsg");
  if (received == 0) throw VmmError(ErrorKind::kPeerGone, "socket: the peer has closed it");
  const int fd = received_fd(message);
  const bool has_ancillary = CMSG_FIRSTHDR(&message) != nullptr;
  if (received != sizeof(record) || record.magic != kMagic || (message.msg_flags & MSG_CTRUNC) ||
      (record.has_fd != 0) != (fd >= 0) || has_ancillary != (fd >= 0)) {
    close_received(message);
    throw VmmError(ErrorKind::kInvalidArgument, "socket: not a page message of this version");
  }
  return Exported{fd, record.key, record.num_bytes};
}

}  // namespace sgl_vmm
