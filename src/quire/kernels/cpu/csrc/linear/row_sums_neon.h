// RowSums of ARM64 with products of bytes; row_sums.h says what they are.
//
// Quads of weights are held in registers while rows pass, so that a row's inputs of all of them are
// one load: four quads of one register, or two of several.
//
// With i8mm, smmla multiplies two outputs' eight inputs by two rows' at once. Until `finish` a pair
// of rows then has its sums in fours, each of two outputs and both rows:
//
//   of[r][u]      output 0 with row r, with row r + 1, output 1 with row r, with row r + 1
//   of[r + 1][u]  the same of outputs 2 and 3
//
// Of an odd number of rows, the last one is its own neighbour. The weights of two quads are zipped
// for it, output by output.
#pragma once
#include <utility>

#include "linear/dot.h"

namespace quire::QUIRE_ISA {

constexpr bool kHoldsQuads = true;
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kHasMatrixProducts = true;
inline DotInts multiply_matrices(DotInts acc, DotInts outputs, int8x16_t rows) {
  return (DotInts)vmmlaq_s32((int32x4_t)acc, (int8x16_t)outputs, rows);
}
#else
constexpr bool kHasMatrixProducts = false;
DotInts multiply_matrices(DotInts, DotInts, int8x16_t);  // not called
#endif

inline DotInts first_halves(DotInts a, DotInts b) {
  return (DotInts)vzip1q_s32((int32x4_t)a, (int32x4_t)b);
}
inline DotInts last_halves(DotInts a, DotInts b) {
  return (DotInts)vzip2q_s32((int32x4_t)a, (int32x4_t)b);
}

// kHeld: quads that are held.
template <int R, int U, int kHeld = U == 1 || R == 1 ? 4 : 2>
struct RowSums {
  static constexpr bool kHasPairs = kHasMatrixProducts && R > 1;
  DotInts of[kHasPairs ? R + R % 2 : R][U];

  // As row_sums.h has it.
  template <typename Start>
  void start(const Start& start_of) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r += kStep) {
      DotInts first = start_of(r);
      if constexpr (kHasPairs) first = first_halves(first, start_of(neighbour(r)));
#pragma GCC unroll 16
      for (int i = 0; i < kStep * U; ++i) of[r + i / U][i % U] = first;
    }
  }

  template <int kQuads, typename LoadQuad>
  void add(const LoadQuad& load_quad, const uint8_t* x, int64_t ld) {
    constexpr int kNow = kQuads < kHeld ? kQuads : kHeld;
    static_assert(kQuads % kNow == 0);
    const uint8_t* rows[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      rows[r] = x + r * ld;
      asm("" : "+r"(rows[r]));  // GCC would compute it anew for each load
    }
#pragma GCC unroll 16
    for (int first = 0; first < kQuads; first += kNow) {
      DotInts held[kNow][U];
#pragma GCC unroll 4
      for (int i = 0; i < kNow; ++i) load_quad(first + i, held[i]);
      if constexpr (kHasPairs)
        add_pairs<kNow>(held, rows, first * 4);
      else
        add_rows<kNow>(held, rows, first * 4);
    }
  }

  void finish() {
    if constexpr (kHasPairs) {
#pragma GCC unroll 16
      for (int r = 0; r < R; r += 2)
#pragma GCC unroll 8
        for (int u = 0; u < U; ++u) {
          const auto low = (int32x4_t)of[r][u], high = (int32x4_t)of[r + 1][u];
          of[r][u] = (DotInts)vuzp1q_s32(low, high);
          of[r + 1][u] = (DotInts)vuzp2q_s32(low, high);
        }
    }
  }

 private:
  static constexpr int kStep = kHasPairs ? 2 : 1;
  static constexpr int neighbour(int r) { return r + 1 < R ? r + 1 : r; }

  // A row's inputs of kNow quads.
  template <int kNow>
  static int8x16_t load_inputs(const uint8_t* x) {
    if constexpr (kNow == 4) return load_as<int8x16_t>(x);
    int8x8_t low = vcreate_s8(0);
    std::memcpy(&low, x, kNow * 4);
    return vcombine_s8(low, vcreate_s8(0));
  }

  template <int kNow>
  void add_rows(const DotInts (&held)[kNow][U], const uint8_t* const (&rows)[R], int at) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      add_row(held, load_inputs<kNow>(rows[r] + at), of[r],
              std::make_integer_sequence<int, kNow>{});
  }

  // kQs: the quads, which an instruction names.
  template <int kNow, int... kQs>
  static void add_row(const DotInts (&held)[kNow][U], int8x16_t inputs, DotInts (&sums)[U],
                      std::integer_sequence<int, kQs...>) {
    const auto add_quad = [&](auto quad) {
#pragma GCC unroll 8
      for (int u = 0; u < U; ++u)
        sums[u] = (DotInts)vdotq_laneq_s32((int32x4_t)sums[u], (int8x16_t)held[quad][u], inputs,
                                           decltype(quad)::value);
    };
    (add_quad(std::integral_constant<int, kQs>{}), ...);
  }

  // A quad that is held alone is multiplied as the first of two, the second being zero.
  template <int kNow>
  void add_pairs(const DotInts (&held)[kNow][U], const uint8_t* const (&rows)[R], int at) {
    constexpr int kEights = kNow / 2 + kNow % 2;
    DotInts low[U][kEights], high[U][kEights];  // outputs 0 and 1, 2 and 3
#pragma GCC unroll 16
    for (int i = 0; i < U * kEights; ++i) {
      const int u = i / kEights, eight = i % kEights;
      DotInts second{};
      if constexpr (kNow > 1) second = held[eight * 2 + 1][u];
      const DotInts first = held[eight * 2][u];
      low[u][eight] = first_halves(first, second);
      high[u][eight] = last_halves(first, second);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r += 2) {
      const auto first = (int64x2_t)load_inputs<kNow>(rows[r] + at);
      const auto second = (int64x2_t)load_inputs<kNow>(rows[neighbour(r)] + at);
      const int64x2_t inputs[2] = {vzip1q_s64(first, second), vzip2q_s64(first, second)};
#pragma GCC unroll 2
      for (int eight = 0; eight < kEights; ++eight)
#pragma GCC unroll 8
        for (int u = 0; u < U; ++u) {
          const auto both = (int8x16_t)inputs[eight];
          of[r][u] = multiply_matrices(of[r][u], low[u][eight], both);
          of[r + 1][u] = multiply_matrices(of[r + 1][u], high[u][eight], both);
        }
    }
  }
};

}  // namespace quire::QUIRE_ISA
