// Products of rows with two registers of int4 outputs at once, or where kHasByteSums with one.
//
// linear_int4.cpp has the formula, and multiplies registers one after the other. Here what is
// loaded of x serves two: the units of a panel, or a unit's halves (kHasHalves). Their sums are
// twice as many chains of instructions, each of which waits for its predecessor. Where an instruction
// multiplies bytes (VNNI), that counts more than registers: with weights in the L1 cache, 2 to 8
// rows took 0.75 to 0.88 of the time of one unit after the other (an Intel Xeon with AMX). The
// numbers are the same, and the order in which they are added.
#pragma once
#include "linear/dot_codes.h"
#include "linear/linear_int4.h"
#include "linear/quantize_rows.h"

namespace quire::QUIRE_ISA {

constexpr int64_t kInt4PairsPerScale = 2;  // pairs of groups that share a scale of x

// Bytes from the first register's numbers to the second's, which are in the next unit or in the
// other half of this one; an output has kOutputBytes.
template <int kOutputBytes>
inline int64_t next_register(int64_t unit_bytes) {
  return kHasHalves ? kIntLanes * kOutputBytes : unit_bytes;
}

// What is summed for some rows: [rows, 32] each.
struct Int4Sums {
  float* scaled;
  float* offsets;
  float* wide;

  Int4Sums from(int lane) const { return {scaled + lane, offsets + lane, wide + lane}; }
};

// The packed form of a pair of groups.
template <int kGroup>
struct PackedPair {
  static constexpr int kGroupBytes = kGroup * int(kUnitOutputs) / 2;
  static constexpr int kBytes = int(kInt4HeaderBytes) + 2 * kGroupBytes;
  const uint8_t* data;

  const uint8_t* scales(int g) const { return data + g * kUnitOutputs; }
  const uint8_t* offsets() const { return data + 2 * kUnitOutputs; }
  const uint8_t* halves(int g) const { return data + kInt4HeaderBytes + g * kGroupBytes; }
};

// Four inputs of two registers' outputs.
struct Int4Quads {
  DotWeights units[2];

  // The low halves of bytes, or with a shift of 4 the high ones. The units lie unit_bytes apart.
  template <int kShift>
  static Int4Quads of(const uint8_t* bytes, int64_t unit_bytes) {
    const auto halves = [](const uint8_t* of_unit) {
      return DotWeights(load_as<DotInts>(of_unit) >> kShift & 0x0f0f0f0f);
    };
    return {{halves(bytes), halves(bytes + unit_bytes)}};
  }
};

// sums [R][2] += one quad of R rows.
template <int R>
inline void add_quads(const Int4Quads& quads, const DotElement* x, int64_t ldx,
                      DotInts (&sums)[R][2]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const DotInput input(x + r * ldx);
    sums[r][0] = dot(sums[r][0], quads.units[0], input);
    sums[r][1] = dot(sums[r][1], quads.units[1], input);
  }
}

// above [R][U] += one group.
template <int R, int U, int kGroup>
inline void add_group_of_units(const uint8_t* halves, const uint8_t* scales, int64_t unit_bytes,
                               const CodeElement* x, int64_t ldx, DotFloats (&above)[R][U]) {
  DotInts sums[R][U] = {};
  if constexpr (kHasByteSums) {
    sum_quads<ByteDot<15>, kGroup / 4, R>(
        [&](int u, int q) {
          const uint8_t* bytes = halves + q / 2 * kQuadBytes / 2 + u * next_register<4>(unit_bytes);
          return load_as<DotInts>(bytes) >> q % 2 * 4 & 0x0f0f0f0f;
        },
        (const uint8_t*)x, nullptr, ldx, sums);
  } else {
#pragma GCC unroll 8
    for (int k = 0; k < kGroup; k += 8) {
      const uint8_t* bytes = halves + k * kUnitOutputs / 2;
      add_quads<R>(Int4Quads::of<0>(bytes, unit_bytes), (const DotElement*)x + k, ldx, sums);
      add_quads<R>(Int4Quads::of<4>(bytes, unit_bytes), (const DotElement*)x + k + 4, ldx, sums);
    }
  }
#pragma GCC unroll 2
  for (int u = 0; u < U; ++u) {
    const DotFloats scale = to_floats(widen_bytes(scales + u * next_register<1>(unit_bytes)));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) above[r][u] = fma(to_floats(sums[r][u]), scale, above[r][u]);
  }
}

// scaled, offsets [R, U registers of 32] += num_pairs pairs of groups, one or two, which share the
// scale `share` of x.
template <int R, int U, int kGroup>
inline void add_share_of_units(const uint8_t* pairs, int64_t num_pairs, int64_t unit_bytes,
                               const RowsOf<CodeElement>& rows, int64_t share,
                               const Int4Sums& sums) {
  static_assert(kInt4PairsPerScale == 2);
  // First, the products.
  const CodeElement* x = rows.data + share * (2 * kInt4PairsPerScale * kGroup);
  const int64_t ldx = rows.ld;
  DotFloats above[R][U] = {};
#pragma GCC unroll 1
  for (int64_t i = 0; i < num_pairs; ++i) {
    const PackedPair<kGroup> pair{pairs + i * PackedPair<kGroup>::kBytes};
#pragma GCC unroll 2
    for (int g = 0; g < 2; ++g)
      add_group_of_units<R, U, kGroup>(pair.halves(g), pair.scales(g), unit_bytes,
                                       x + (i * 2 + g) * kGroup, ldx, above);
  }
  // Then, the offsets, once the registers of the integer sums are free. A second pair that is not
  // there has offsets of zero.
  const int64_t last = num_pairs - 1;
  DotInts first_o[U], last_o[U] = {};
#pragma GCC unroll 2
  for (int u = 0; u < U; ++u) {
    const uint8_t* o = PackedPair<kGroup>{pairs}.offsets() + u * next_register<2>(unit_bytes);
    first_o[u] = widen_byte_pairs(o);
    if (last > 0) last_o[u] = widen_byte_pairs(o + PackedPair<kGroup>::kBytes);
  }
  const float* x_scale = rows.scales + share;
  const int32_t* x_sums = rows.sums + share * kInt4PairsPerScale;
  const int64_t num_scales = rows.num_scales, num_sums = rows.num_sums;
  float *scaled = sums.scaled, *offsets = sums.offsets;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const auto scale = (DotFloats)all_lanes(x_scale + r * num_scales);
    const DotInts first_sum = all_lanes(x_sums + r * num_sums);
    const DotInts last_sum = all_lanes(x_sums + r * num_sums + last);
#pragma GCC unroll 2
    for (int u = 0; u < U; ++u) {
      const int64_t at = r * kPanelOutputs + u * kIntLanes;
      const DotInts below =
          dot_pairs(dot_pairs(DotInts{}, first_o[u], first_sum), last_o[u], last_sum);
      const DotFloats more = fma(above[r][u], scale, load_as<DotFloats>(scaled + at));
      const DotFloats lower = fma(to_floats(below), scale, load_as<DotFloats>(offsets + at));
      std::memcpy(scaled + at, &more, sizeof more);
      std::memcpy(offsets + at, &lower, sizeof lower);
    }
  }
}

}  // namespace quire::QUIRE_ISA
