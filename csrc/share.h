// Handles between processes, over a connected Unix socket: one message carries one page.
//
//   export_handle -> Exported --send_page--> socket --receive_page--> Exported -> import_handle
//
// The descriptor travels as ancillary data (SCM_RIGHTS), its place in the file and its size as a
// fixed record of 32 bytes. Names never travel: whoever was given no descriptor cannot ask for one.
#pragma once

#include "vmm/backend.h"

namespace sgl_vmm {

// Sends a page; closes nothing. Throws kPeerGone when nobody listens any more.
void send_page(int socket_fd, const Exported& exported);

// Waits for a page; the caller owns its descriptor. Throws kPeerGone at the end of the stream,
// kInvalidArgument for a message that send_page did not write.
Exported receive_page(int socket_fd);

}  // namespace sgl_vmm
