// Packs a checkpoint's rows into the layouts that the kernels read.
//
// Compiled once, for all instruction sets, which share the layouts; linear.h describes them.
#pragma once
#include "library/abi.h"

namespace quire {

// Bytes of Weights::weights for this format, N, K, group_size and interleave; a multiple of 64.
int64_t packed_bytes(const Weights&);

// Number of floats of Weights::scales; 0 for dense formats.
int64_t num_scales(const Weights&);

// Quantizes if the format says so, and stores outputs [first, first + num_rows) of the linear,
// given as rows of K elements (fp32 or bf16), `ld` elements apart. Outputs count as in the
// checkpoint: all of gate, then all of up, where the linear interleaves. Weights of padding are
// zeroed by `clear_padding`, once. Calls for different rows may run at once. For dense formats
// only: kInt8 and kInt4 are rounded by `Kernels::round_int8` and `round_int4`, and kBlockQuantized
// and kFloat8 take no numbers.
void pack_rows(const Weights&, const void* rows, DType rows_dtype, int64_t ld, int64_t first,
               int64_t num_rows);
void clear_padding(const Weights&);

// Stores codes as they are, for kBlockQuantized and kFloat8; else as pack_rows.
void pack_codes(const Weights&, const CodeRows& rows, int64_t first, int64_t num_rows);

// The same from blocks of a GGUF file, whose numbers become codes without rounding. type: ggml's
// number of the blocks' format; row_bytes: from a row to the next. False: it has no layout.
bool pack_blocks(const Weights&, int32_t type, const uint8_t* rows, int64_t row_bytes,
                 int64_t first, int64_t num_rows);

// Stores the weights of the wide inputs of a kBlockQuantized linear, which has been packed.
void pack_wide(const Weights&);

// Unpacks words [num_rows, num_columns] of several codes into codes of a byte each. `ld` words from
// a row to the next; width: 4 or 8. order: null: a word has 32 / width inputs of an output, from
// the lowest bits up, and codes are [num_columns, num_rows * 32 / width]; otherwise width is 4,
// num_rows a multiple of 8, a word has eight outputs of an input (output order[i] in the i-th
// lowest bits), and codes are [num_columns * 8, num_rows].
void unpack_words(const uint32_t* words, int64_t ld, int64_t num_rows, int64_t num_columns,
                  int32_t width, const int32_t* order, uint8_t* codes);

// Stores weights that are int8 already, [num_rows, K], with a scale each, for kInt8; else as
// pack_rows.
void pack_int8(const Weights&, const int8_t* rows, const float* scales, int64_t first,
               int64_t num_rows);

// The inverse for dense formats, kBlockQuantized, kFloat8 and kInt8 with a code_format: the given
// outputs as rows in the packed dtype (fp32, bf16), or in CodeFormat::row_dtype; for embeddings and
// tests.
void unpack_rows(const Weights&, const int64_t* outputs, int64_t num_rows, void* rows, int64_t ld);

// The same by format; pack.cpp dispatches to them.
int64_t packed_bytes_int8(const Weights&);  // pack_int8.cpp
int64_t num_scales_int8(const Weights&);
void clear_padding_int8(const Weights&);
void unpack_rows_int8(const Weights&, const int64_t* outputs, int64_t num_rows, void* rows,
                      int64_t ld);
int64_t packed_bytes_float8(const Weights&);  // pack_float8.cpp
int64_t num_scales_float8(const Weights&);
void clear_padding_float8(const Weights&);
void pack_codes_float8(const Weights&, const CodeRows& rows, int64_t first, int64_t num_rows);
void unpack_rows_float8(const Weights&, const int64_t* outputs, int64_t num_rows, void* rows,
                        int64_t ld);
int64_t packed_bytes_block_quantized(const Weights&);  // pack_block_quantized.cpp
void pack_codes_block_quantized(const Weights&, const CodeRows& rows, int64_t first,
                                int64_t num_rows);
void clear_padding_block_quantized(const Weights&);
void unpack_rows_block_quantized(const Weights&, const int64_t* outputs, int64_t num_rows,
                                 void* rows, int64_t ld);

}  // namespace quire
