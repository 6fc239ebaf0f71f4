// Packs and unpacks weights by format; dense formats are done here, rounding/ packs int8 and int4.

#include "packing/pack.h"

#include <cstring>

#include "linear/linear.h"
#include "linear/linear_int4.h"
#include "packing/halves.h"

namespace quire {
namespace {

int64_t units_per_panel(const Weights& linear) {
  return linear.format == kDenseBF16 ? divide_up(linear.num_inputs, 2) : linear.num_inputs;
}

uint16_t as(uint16_t x, uint16_t) { return x; }
float as(uint16_t x, float) { return from_bf16(x); }
uint16_t as(float x, uint16_t) { return to_bf16(x); }
float as(float x, float) { return x; }
uint32_t as(uint32_t x, uint32_t) { return x; }

// An output's inputs lie `kPer` together, then a whole unit of the panel apart.
template <typename Packed>
struct Line {
  static constexpr int64_t kPer = sizeof(Packed) == 2 ? 2 : 1;
  Packed* first;

  Line(const Weights& linear, int64_t n) {
    const int64_t position = packed_position(linear, n);
    const int64_t panel_size = units_per_panel(linear) * kPanelOutputs * kPer;
    first = const_cast<Packed*>(static_cast<const Packed*>(linear.weights)) +
            position / kPanelOutputs * panel_size + position % kPanelOutputs * kPer;
  }
  Packed& operator[](int64_t k) const {
    return first[k / kPer * kPanelOutputs * kPer + k % kPer];
  }
};

// Sixteen rows at a time and inputs outside, so that whole cache lines are written one by one.
template <typename Packed, typename Row>
void pack_dense(const Weights& linear, const Row* rows, int64_t ld, int64_t first, int64_t num_rows,
                int64_t num_inputs) {
  for (int64_t start = 0; start < num_rows; start += kUnitOutputs) {
    const int64_t end = start + kUnitOutputs < num_rows ? start + kUnitOutputs : num_rows;
    for (int64_t k = 0; k < num_inputs; k += 64) {
      const int64_t end_k = k + 64 < num_inputs ? k + 64 : num_inputs;
      for (int64_t row = start; row < end; ++row) {
        const Line<Packed> line(linear, first + row);
        for (int64_t i = k; i < end_k; ++i) line[i] = as(rows[row * ld + i], Packed{});
      }
    }
  }
}

template <typename Packed>
void pack_dense_from(const Weights& linear, const void* rows, DType rows_dtype, int64_t ld,
                     int64_t first, int64_t num_rows) {
  const int64_t K = linear.num_inputs;
  const bool is_aligned = reinterpret_cast<uintptr_t>(rows) % 4 == 0 && ld % 2 == 0 && K % 2 == 0;
  const auto* pairs = static_cast<const uint32_t*>(rows);
  if (sizeof(Packed) == 2 && rows_dtype == kBF16 && is_aligned)  // neighbours travel together
    pack_dense<uint32_t>(linear, pairs, ld / 2, first, num_rows, K / 2);
  else if (rows_dtype == kBF16)
    pack_dense<Packed>(linear, static_cast<const uint16_t*>(rows), ld, first, num_rows, K);
  else
    pack_dense<Packed>(linear, static_cast<const float*>(rows), ld, first, num_rows, K);
}

template <typename Packed>
void unpack_dense(const Weights& linear, const int64_t* outputs, int64_t num_rows, Packed* rows,
                  int64_t ld) {
  for (int64_t row = 0; row < num_rows; ++row) {
    const Line<Packed> line(linear, outputs[row]);
    for (int64_t k = 0; k < linear.num_inputs; ++k) rows[row * ld + k] = line[k];
  }
}

void clear_padding_int4(const Weights& linear) {
  const int64_t last = num_panels(linear) - 1, panel_bytes = 2 * int4_unit_bytes(linear);
  std::memset(static_cast<uint8_t*>(const_cast<void*>(linear.weights)) + last * panel_bytes, 0,
              panel_bytes);
  for (int64_t n = last * kPanelOutputs; n < padded_outputs(linear); ++n) {
    int4_factors(linear)[n] = int4_factors(linear)[padded_outputs(linear) + n] = 0;
    if (linear.num_wide > 0) int4_wide_scales(linear)[n] = 0.0f;
  }
}

int64_t dense_bytes(const Weights& linear) {
  return padded_outputs(linear) * units_per_panel(linear) * 4;
}

// Padding is found in the last panel, in the last unit of each panel where K is odd, and in either
// half of the last panel where the linear interleaves; only these are cleared, so that pages of the
// rest are touched first by the threads that pack them.
void clear_dense(const Weights& linear) {
  auto* weights = static_cast<uint8_t*>(const_cast<void*>(linear.weights));
  const int64_t panels = num_panels(linear);
  const int64_t panel_bytes = dense_bytes(linear) / panels;
  const bool is_odd = linear.format == kDenseBF16 && linear.num_inputs % 2 == 1;
  for (int64_t panel = 0; is_odd && panel < panels; ++panel)
    std::memset(weights + (panel + 1) * panel_bytes - kPanelOutputs * 4, 0, kPanelOutputs * 4);
  std::memset(weights + (panels - 1) * panel_bytes, 0, panel_bytes);
}

}  // namespace

int64_t packed_bytes(const Weights& linear) {
  if (linear.format == kInt8) return packed_bytes_int8(linear);
  if (linear.format == kInt4) return num_panels(linear) * 2 * int4_unit_bytes(linear);
  if (linear.format == kBlockQuantized) return packed_bytes_block_quantized(linear);
  if (linear.format == kFloat8) return packed_bytes_float8(linear);
  return dense_bytes(linear);
}

int64_t num_scales(const Weights& linear) {
  if (linear.format == kInt8) return num_scales_int8(linear);
  if (linear.format == kInt4) return padded_outputs(linear) * (linear.num_wide > 0 ? 2 : 1);
  if (linear.format == kFloat8) return num_scales_float8(linear);
  if (linear.format == kBlockQuantized) return padded_outputs(linear) * linear.num_wide;
  return 0;
}

void pack_rows(const Weights& linear, const void* rows, DType rows_dtype, int64_t ld, int64_t first,
               int64_t num_rows) {
  if (linear.format == kDenseBF16)
    pack_dense_from<uint16_t>(linear, rows, rows_dtype, ld, first, num_rows);
  else
    pack_dense_from<float>(linear, rows, rows_dtype, ld, first, num_rows);
}

void pack_codes(const Weights& linear, const CodeRows& rows, int64_t first, int64_t num_rows) {
  if (linear.format == kFloat8) return pack_codes_float8(linear, rows, first, num_rows);
  pack_codes_block_quantized(linear, rows, first, num_rows);
}

void clear_padding(const Weights& linear) {
  if (linear.format == kInt8) return clear_padding_int8(linear);
  if (linear.format == kInt4) return clear_padding_int4(linear);
  if (linear.format == kBlockQuantized) return clear_padding_block_quantized(linear);
  if (linear.format == kFloat8) return clear_padding_float8(linear);
  clear_dense(linear);
}

void unpack_rows(const Weights& linear, const int64_t* outputs, int64_t num_rows, void* rows,
                 int64_t ld) {
  if (linear.format == kBlockQuantized)
    return unpack_rows_block_quantized(linear, outputs, num_rows, rows, ld);
  if (linear.format == kInt8) return unpack_rows_int8(linear, outputs, num_rows, rows, ld);
  if (linear.format == kFloat8) return unpack_rows_float8(linear, outputs, num_rows, rows, ld);
  if (linear.format == kDenseBF16)
    unpack_dense(linear, outputs, num_rows, static_cast<uint16_t*>(rows), ld);
  else
    unpack_dense(linear, outputs, num_rows, static_cast<float*>(rows), ld);
}

}  // namespace quire
