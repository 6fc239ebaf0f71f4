// One preadv for some records at a time, so that they are still in the cache when they are checked.
#include "library/read_records.h"

#include <sys/uio.h>

#include <cerrno>
#include <cstring>

namespace quire {
namespace {

constexpr int64_t kReadBytes = 512 << 10;
constexpr int kMaxBuffers = 256;

struct Place {
  int64_t offset, num_bytes, address;
};

// Fill the buffers from offset on, however few bytes each call brings. Returns where the last byte
// that came ends, or -1 with errno set.
int64_t read_all(int descriptor, iovec* buffers, int count, int64_t offset) {
  while (count > 0) {
    ssize_t came = preadv(descriptor, buffers, count, offset);
    if (came < 0 && errno == EINTR) continue;
    if (came < 0) return -1;
    if (came == 0) break;  // the file ends here
    offset += came;
    for (; count > 0 && size_t(came) >= buffers->iov_len; ++buffers, --count)
      came -= buffers->iov_len;
    if (count > 0) {
      buffers->iov_base = static_cast<char*>(buffers->iov_base) + came;
      buffers->iov_len -= came;
    }
  }
  return offset;
}

}  // namespace

int32_t read_records(const Kernels& kernels, int32_t descriptor, int64_t num_records,
                     const int64_t* places, const uint8_t* digests, uint8_t* are_sound) {
  static thread_local char between[kMaxGapBytes];  // never looked at
  const Place* all = reinterpret_cast<const Place*>(places);
  std::memset(are_sound, 0, num_records);
  for (int64_t first = 0, end; first < num_records; first = end) {
    iovec buffers[kMaxBuffers];
    int count = 0;
    int64_t position = all[first].offset;
    for (end = first; end < num_records && count + 2 <= kMaxBuffers; ++end) {
      const Place& place = all[end];
      if (end > first && place.offset + place.num_bytes - all[first].offset > kReadBytes) break;
      if (place.offset > position) buffers[count++] = {between, size_t(place.offset - position)};
      buffers[count++] = {reinterpret_cast<void*>(place.address), size_t(place.num_bytes)};
      position = place.offset + place.num_bytes;
    }
    const int64_t came = read_all(descriptor, buffers, count, all[first].offset);
    if (came < 0) return errno;
    for (int64_t i = first; i < end; ++i) {
      if (all[i].offset + all[i].num_bytes > came) break;
      uint8_t digest[16];
      kernels.xxh3_128(reinterpret_cast<const uint8_t*>(all[i].address), all[i].num_bytes, digest);
      are_sound[i] = std::memcmp(digest, digests + 16 * i, 16) == 0;
    }
  }
  return 0;
}

}  // namespace quire
