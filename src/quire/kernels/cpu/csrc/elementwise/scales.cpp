// Scales, sums, and rows of tables.
#include "kernels_isa.h"
#include "elementwise/rows.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kSerialCopyBytes = 65536;

// addend: null: none.
template <typename T>
inline void scale_row(const T* x, float factor, const T* addend, T* out, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t n = size - i;
    vf y = load_up_to(x + i, n) * splat(factor);
    if (addend != nullptr) y = load_up_to(addend + i, n) + rounded<T>(y);
    store_up_to(out + i, y, n);
  }
}

}  // namespace

void scale(Pool& pool, const Op& op, int64_t M) {
  with_dtype(op.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto x = rows_of_in<T>(op), addend = rows_of_second<T>(op);
    const auto out = rows_of_out<T>(op);
    for_pieces(pool, op, M,
               [=, factor = op.factor](int64_t t, int64_t h, int64_t first, int64_t count) {
                 const T* added_to = addend.first == nullptr ? nullptr : addend.at(t, h) + first;
                 scale_row(x.at(t, h) + first, factor, added_to, out.at(t, h) + first, count);
               });
  });
}

void embed(Pool& pool, DType dtype, const void* table, const int64_t* indices, void* out,
           int64_t ldo, int64_t M, int64_t size) {
  const int64_t element_bytes = dtype == kBF16 ? 2 : 4, row_bytes = size * element_bytes;
  const auto* rows = static_cast<const uint8_t*>(table);
  auto* to = static_cast<uint8_t*>(out);
  const int64_t chunk = kSerialCopyBytes / row_bytes + 1;
  for_chunks(pool, M, chunk, [=](int64_t first, int64_t end, int) {
    for (int64_t t = first; t < end; ++t)
      std::memcpy(to + t * ldo * element_bytes, rows + indices[t] * row_bytes, row_bytes);
  });
}

}  // namespace quire::QUIRE_ISA
