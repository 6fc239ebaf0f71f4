// Reads records of a file straight to where they belong, and checks them.
#pragma once
#include <cstdint>

#include "library/kernels.h"

namespace quire {

// places: [num_records, 3]: a record's offset in the file, its bytes (above 240), the address that
// they are read to; offsets ascend, no record overlaps another, and less than kMaxGapBytes lie
// between two. digests: [num_records, 16] of XXH3. are_sound: [num_records], set to 1 where all
// bytes came and have the digest, else to 0. Returns 0, or errno of the read that failed.
constexpr int64_t kMaxGapBytes = 64 << 10;
int32_t read_records(const Kernels&, int32_t descriptor, int64_t num_records,
                     const int64_t* places, const uint8_t* digests, uint8_t* are_sound);

}  // namespace quire
