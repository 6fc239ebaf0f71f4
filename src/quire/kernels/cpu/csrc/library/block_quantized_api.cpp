// The exported functions of weights that are packed as they are.
#include "library/api.h"
#include "packing/pack.h"

using namespace quire;

extern "C" {

void quire_pack_codes(const Weights* linear, const CodeRows* rows, int64_t first,
                      int64_t num_rows) {
  pack_codes(*linear, *rows, first, num_rows);
}

int32_t quire_pack_blocks(const Weights* linear, int32_t type, const void* rows, int64_t row_bytes,
                          int64_t first, int64_t num_rows) {
  return pack_blocks(*linear, type, static_cast<const uint8_t*>(rows), row_bytes, first, num_rows);
}

void quire_pack_wide(const Weights* linear) { pack_wide(*linear); }

void quire_unpack_words(const uint32_t* words, int64_t ld, int64_t num_rows, int64_t num_columns,
                        int32_t width, const int32_t* order, uint8_t* codes) {
  unpack_words(words, ld, num_rows, num_columns, width, order, codes);
}

void quire_pack_int8(const Weights* linear, const void* rows, const float* scales, int64_t first,
                     int64_t num_rows) {
  pack_int8(*linear, static_cast<const int8_t*>(rows), scales, first, num_rows);
}

}  // extern "C"
