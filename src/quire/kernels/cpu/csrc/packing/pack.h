// Packs a checkpoint's rows into the layouts that the kernels read.
//
// Compiled once, for all instruction sets, which share the layouts; linear.h describes them.
#pragma once
#include "library/abi.h"

namespace quire {

// Of Weights::weights for this format, N, K, group_size and interleave; a multiple of 64.
int64_t packed_bytes(const Weights&);

// How many floats Weights::scales has; 0 for dense formats.
int64_t num_scales(const Weights&);

// Quantizes if the format says so, and stores outputs [first, first + num_rows) of the linear,
// given as rows of K elements (fp32 or bf16), `ld` elements apart. Outputs count as in the
// checkpoint: all of gate, then all of up, where the linear interleaves. Weights of padding are
// zeroed by `clear_padding`, once. scales and sums are filled through pointers const to kernels.
// Calls for different rows may run at once. Of all formats but kInt4, which is
// `Kernels::round_int4`'s.
void pack_rows(const Weights&, const void* rows, DType rows_dtype, int64_t ld, int64_t first,
               int64_t num_rows);
void clear_padding(const Weights&);

// The inverse for dense formats: output `first` ... as rows in the packed dtype (fp32, bf16); for
// an embedding that shares a tied head's weights, and for tests.
void unpack_rows(const Weights&, const int64_t* outputs, int64_t num_rows, void* rows, int64_t ld);

// The same by format; pack.cpp dispatches to them.
int64_t packed_bytes_int8(const Weights&);  // pack_int8.cpp
int64_t num_scales_int8(const Weights&);
void pack_rows_int8(const Weights&, const void* rows, DType rows_dtype, int64_t ld, int64_t first,
                    int64_t num_rows);
void clear_padding_int8(const Weights&);

}  // namespace quire
