// Sums of the products of some rows of x with some registers of outputs, in exact integers.
//
// Rows of a tile meet weights quad by quad. ARM64's products of bytes take several quads at once
// (row_sums_neon.h).
#pragma once
#include "linear/dot.h"
#if defined(__ARM_FEATURE_DOTPROD)
#include "linear/row_sums_neon.h"
#else

namespace quire::QUIRE_ISA {

constexpr bool kHoldsQuads = false, kHasMatrixProducts = false;
DotInts first_halves(DotInts, DotInts);  // neither is called
DotInts last_halves(DotInts, DotInts);

// R rows times U registers: `start`, then `add` any number of times, then `finish`, after which
// `of` has the sums.
// What follows U is for other sets' RowSums.
template <int R, int U, int = 0>
struct RowSums {
  DotInts of[R][U];

  // start_of(r): what the sums of row r start from, in all lanes.
  template <typename Start>
  void start(const Start& start_of) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const DotInts first = start_of(r);
#pragma GCC unroll 2
      for (int u = 0; u < U; ++u) of[r][u] = first;
    }
  }

  // load_quad(q, to): quad q of all registers. x: the first row's inputs of quad 0; the next row's
  // are `ld` bytes on.
  template <int kQuads, typename LoadQuad>
  void add(const LoadQuad& load_quad, const uint8_t* x, int64_t ld) {
#pragma GCC unroll 16
    for (int q = 0; q < kQuads; ++q) {
      DotInts quad[U];
      load_quad(q, quad);
#pragma GCC unroll 2
      for (int u = 0; u < U; u += 2) {
        const int next = u + 1 < U ? u + 1 : u;
        const DotWeights low(quad[u]), high(quad[next]);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const DotInput input((const DotElement*)(x + r * ld) + q * 4);
          of[r][u] = dot(of[r][u], low, input);
          if (next != u) of[r][next] = dot(of[r][next], high, input);
        }
      }
    }
  }

  void finish() {}
};

}  // namespace quire::QUIRE_ISA
#endif
