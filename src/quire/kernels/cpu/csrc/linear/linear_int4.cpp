// Linears with int4 weights in groups and int8 activations.
//
// Layout and formula: linear_int4.h; activations: quantize_rows.h. For a row m and an output n
//
//   scaled  += x_scale[m, h] * (sum over h's groups g of s[n, g] * dot[m, n, g])
//   offsets += x_scale[m, h] * (sum over h's groups g of o[n, g] * sum[m, g])
//   result   = S[n] * scaled - O[n] * offsets (+ wide[m, n] * x_scale[m] * V[n])
//
// h after h, the inputs of x that share a scale, where dot = sum over the group of q[n, k] x[m, k],
// sum = that of x[m, k], and wide = the dot product of the wide inputs are exact, as is what
// `offsets` has in brackets; the rest is in fp32, one rounding for a product and a sum (fma).
// Weights are taken from the halves of bytes where they are multiplied, once for all rows of a
// tile: unpacking them beforehand was slower however many rows use them (Zen 4).
#include "linear/linear_int4.h"

#include <utility>

#include "linear/dot_codes.h"
#include "linear/epilogue.h"
#include "linear/int4_units.h"
#include "linear/quantize_rows.h"
#include "linear/panel_task.h"
#include "linear/row_sums.h"
#include "threads/work_stealing.h"

namespace quire::QUIRE_ISA {
namespace {

// From two rows on, two units are read side by side, which the processor does not fetch ahead by
// itself where units are short. Two rows took 1.60 times as long as one without requests of ours and
// 1.16 with them (2,048 x 2,048), 2.98 and 1.37 (30,720 outputs, 256 inputs; one thread, Zen 4).
constexpr int64_t kMinFetchedRows = 2;
constexpr int64_t kAheadBytes = 8192;
constexpr int kUnit = int(kUnitOutputs);
constexpr int kPanel = int(kPanelOutputs);
constexpr int64_t kPairsPerScale = kInt4PairsPerScale;
using Sums = Int4Sums;
using Rows = RowsOf<CodeElement>;

// How many rows a tile has at most, and how many units it multiplies at once. A row takes two
// registers for each register of outputs that is multiplied with others (int4_units.h), and else
// three: a group's integer sum, and what has been summed of the groups that share a scale of x, of
// products and of offsets.
#if defined(__AVX512VNNI__)
constexpr int kMaxRows = 8;
constexpr int kStepsUnrolled = 8;
#else
constexpr int kMaxRows = kHasByteSums ? 6 : kHas32Registers ? 8 : 3;
// g++ 12 takes time quadratic in the length of the loop's body.
constexpr int kStepsUnrolled = kHas32Registers ? 2 : 8;
#endif
constexpr int units_at_once(int num_rows) { return kIntLanes == kUnit && num_rows > 1 ? 2 : 1; }
constexpr int registers_at_once(int num_rows) { return kHasHalves ? 2 : units_at_once(num_rows); }

// above [R] += one group of R rows. Few rows have two sums each, or the processor would wait for
// one product before it adds the next.
template <int R, int kGroup>
inline void add_group(const uint8_t* halves, DotFloats scale, const DotElement* x, int64_t ldx,
                      DotFloats (&above)[R]) {
  if constexpr (kHoldsQuads) {
    const auto load_quad = [&](int q, DotInts (&to)[1]) {
      const auto pair = load_as<DotInts>(halves + q / 2 * 4 * kUnit);
      to[0] = q % 2 == 0 ? pair & 0x0f0f0f0f : high_halves(pair);
    };
    RowSums<R, 1> sums;
    sums.start([](int) { return DotInts{}; });
    sums.template add<kGroup / 4>(load_quad, (const uint8_t*)x, ldx * int64_t(sizeof *x));
    sums.finish();
#pragma GCC unroll 9
    for (int r = 0; r < R; ++r) above[r] = fma(to_floats(sums.of[r][0]), scale, above[r]);
    return;
  }
  constexpr int kSums = R < 3 ? 2 : 1;
  DotInts sums[R][kSums] = {};
#pragma GCC unroll kStepsUnrolled
  for (int k = 0; k < kGroup; k += 8) {
    const auto bytes = load_as<DotInts>(halves + k * kUnit / 2);
    const DotWeights low(bytes & 0x0f0f0f0f), high(bytes >> 4 & 0x0f0f0f0f);
#pragma GCC unroll 9
    for (int r = 0; r < R; ++r) {
      sums[r][0] = dot(sums[r][0], low, DotInput(x + r * ldx + k));
      sums[r][kSums - 1] = dot(sums[r][kSums - 1], high, DotInput(x + r * ldx + k + 4));
    }
  }
#pragma GCC unroll 9
  for (int r = 0; r < R; ++r) {
    const DotInts sum = kSums == 2 ? sums[r][0] + sums[r][kSums - 1] : sums[r][0];
    above[r] = fma(to_floats(sum), scale, above[r]);
  }
}

// scaled, offsets [R, a lane's registers of 32] += the pairs [first, end), which share a scale of
// x, `share`. Both are in the L1 cache, as there are too few registers for them.
template <int R, int kGroup>
inline void add_share(const PackedPair<kGroup>& unit, int64_t first, int64_t end, int64_t share,
                      int lane, const Rows& rows, Prefetch& prefetch, const Sums& sums) {
  DotFloats above[R] = {};
  DotInts below[R] = {};
  for (int64_t i = first; i < end; ++i) {
    const PackedPair<kGroup> pair{unit.data + i * unit.kBytes};
    prefetch.step();
    const DotInts o = widen_byte_pairs(pair.offsets() + lane * 2);
#pragma GCC unroll 9
    for (int r = 0; r < R; ++r)
      below[r] = dot_pairs(below[r], o, DotInts{} + rows.sums[r * rows.num_sums + i]);
#pragma GCC unroll 2
    for (int g = 0; g < 2; ++g)
      add_group<R, kGroup>(pair.halves(g) + lane * 4,
                           to_floats(widen_bytes(pair.scales(g) + lane)),
                           (const DotElement*)rows.data + (i * 2 + g) * kGroup, rows.ld, above);
  }
#pragma GCC unroll 9
  for (int r = 0; r < R; ++r) {
    const DotFloats scale = DotFloats{} + rows.scales[r * rows.num_scales + share];
    float* const scaled = sums.scaled + r * kPanel + lane;
    float* const offsets = sums.offsets + r * kPanel + lane;
    const bool is_first = share == 0;
    const DotFloats scaled_now = is_first ? DotFloats{} : load_as<DotFloats>(scaled);
    const DotFloats offsets_now = is_first ? DotFloats{} : load_as<DotFloats>(offsets);
    const DotFloats more = fma(above[r], scale, scaled_now);
    const DotFloats lower = fma(to_floats(below[r]), scale, offsets_now);
    std::memcpy(scaled, &more, sizeof more);
    std::memcpy(offsets, &lower, sizeof lower);
  }
}

// wide [R]: the products of the wide inputs, times their scale of x, which is the row's last.
template <int R>
inline void multiply_wide(const uint8_t* bytes, int64_t num_wide, const Rows& rows,
                          const CodeElement* x, float* wide) {
  const int64_t last = rows.num_scales - 1;
  for (int r = 0; r < R; ++r) {
    DotInts sum{};
    if constexpr (ByteDot<255>::kBias == 0)
      sum += rows.sums[r * rows.num_sums + rows.num_sums - 1];
    for (int64_t k = 0; k < num_wide; k += 4) {
      const auto weights = load_as<DotInts>(bytes + k * kUnit);
      const CodeElement* quad = x + r * rows.ld + k;
      if constexpr (kHasByteSums)
        sum += multiply_quad<ByteDot<255>>(weights, quad);
      else
        sum = dot(sum, DotWeights(weights), DotInput((const DotElement*)quad));
    }
    const DotFloats scale = DotFloats{} + rows.scales[r * rows.num_scales + last];
    const DotFloats result = to_floats(sum) * scale;
    std::memcpy(wide + r * kPanel, &result, sizeof result);
  }
}

// sums [R, 16 of 32] of units_at_once(R) units.
template <int R, int kGroup>
void multiply_units(const uint8_t* unit, int64_t num_pairs, int64_t num_wide,
                    const Rows& rows, Prefetch prefetch, const Sums& sums) {
  constexpr int kRegisters = registers_at_once(R);
  constexpr int kLanesAtOnce = kHasHalves ? kUnit : kIntLanes;
  static_assert(kRegisters == 1 || kHasHalves || kIntLanes == kUnit);
  constexpr int64_t kPairBytes = PackedPair<kGroup>::kBytes;
  const int64_t unit_bytes = num_pairs * kPairBytes + num_wide * kUnit;
  prefetch.spread(num_pairs * (kUnit / kLanesAtOnce));
  constexpr bool kByInt4Units = kHasByteSums || kRegisters == 2;
  if constexpr (kByInt4Units) {
    for (int r = 0; r < R; ++r) {
      std::memset(sums.scaled + r * kPanel, 0, kRegisters * kIntLanes * sizeof(float));
      std::memset(sums.offsets + r * kPanel, 0, kRegisters * kIntLanes * sizeof(float));
    }
  }
  for (int lane = 0; lane < kUnit; lane += kLanesAtOnce) {
    for (int64_t first = 0, share = 0; first < num_pairs; first += kPairsPerScale, ++share) {
      const int64_t left = num_pairs - first, count = left < kPairsPerScale ? left : kPairsPerScale;
      if constexpr (kByInt4Units) {
        for (int64_t i = 0; i < count; ++i) prefetch.step();
        add_share_of_units<R, kRegisters, kGroup>(unit + first * kPairBytes, count, unit_bytes,
                                                  rows, share, sums);
      } else {
        add_share<R, kGroup>({unit}, first, first + count, share, lane, rows, prefetch, sums);
      }
    }
    if (num_wide == 0) continue;
    for (int u = 0; u < kRegisters; ++u)
      multiply_wide<R>(
          unit + u * next_register<4>(unit_bytes) + num_pairs * kPairBytes + lane * 4, num_wide,
          rows, rows.data + num_pairs * 2 * kGroup, sums.wide + u * kIntLanes + lane);
  }
}

using MultiplyUnits = void (*)(const uint8_t*, int64_t, int64_t, const Rows&, Prefetch,
                               const Sums&);

// The functions of R = 1 .. kMaxRows.
template <int kGroup, int... kRs>
MultiplyUnits choose_among(int64_t num_rows, std::integer_sequence<int, kRs...>) {
  static constexpr MultiplyUnits kFunctions[] = {&multiply_units<kRs + 1, kGroup>...};
  return kFunctions[num_rows - 1];
}

template <int kGroup>
MultiplyUnits choose(int64_t num_rows) {
  return choose_among<kGroup>(num_rows, std::make_integer_sequence<int, kMaxRows>{});
}

template <int kGroup>
struct Int4Task {
  const Weights& linear;
  Output output;
  Rows x;

  void run(Range rows, int64_t panel) const {
    const int64_t unit_bytes = int4_unit_bytes(linear), num_bytes = 2 * unit_bytes;
    const uint8_t* weights = static_cast<const uint8_t*>(linear.weights) + panel * num_bytes;
    const int64_t num_blocks = divide_up(rows.size(), kMaxRows);
    // Units that are read side by side are not what lies ahead of either.
    const bool is_sequential = num_blocks == 1 && units_at_once(int(rows.size())) == 1;
    const int64_t ahead = is_sequential ? kAheadBytes : num_bytes;
    const int64_t num_lines = rows.size() < kMinFetchedRows ? 0 : num_bytes / kLineBytes;
    alignas(64) float scaled[kMaxRows * kPanel], offsets[kMaxRows * kPanel];
    alignas(64) float wide[kMaxRows * kPanel];
    const Sums sums{scaled, offsets, wide};
    for (int64_t i = 0; i < num_blocks; ++i) {
      const Range block = rows.part(i, num_blocks);
      const int units = units_at_once(int(block.size())), num_parts = 2 / units;
      for (int unit = 0; unit < 2; unit += units) {
        const Range lines =
            Range{0, num_lines}.part(i * num_parts + unit, num_blocks * num_parts);
        choose<kGroup>(block.size())(
            weights + unit * unit_bytes, int4_group_pairs(linear), linear.num_wide,
            x.from(block.first),
            Prefetch(weights + ahead + lines.first * kLineBytes, lines.size()),
            sums.from(unit * kUnit));
      }
      finish(block, panel, sums);
    }
  }

 private:
  void finish(Range block, int64_t panel, const Sums& sums) const {
    const uint16_t* S = int4_factors(linear) + panel * kPanel;
    const uint16_t* O = S + padded_outputs(linear);
    const float* V = int4_wide_scales(linear) + panel * kPanel;
    const bool has_wide = linear.num_wide > 0;
    finish_rows_of(output, block, panel, [=](int64_t row, int lane) {
      const int64_t i = row * kPanel + lane;
      const part above = load_part(S + lane) * load_part(sums.scaled + i);
      const part result = above - load_part(O + lane) * load_part(sums.offsets + i);
      return has_wide ? result + load_part(sums.wide + i) * load_part(V + lane) : result;
    });
  }
};

template <int kGroup>
void run(Pool& pool, const LinearCall& call) {
  const Weights& linear = call.any();
  const RowRounding how{.group = 2 * kPairsPerScale * kGroup,
                        .padded = int4_group_pairs(linear) * 2 * kGroup,
                        .part = kGroup,
                        .wide = linear.wide_inputs,
                        .num_wide = linear.num_wide};
  const Rows x = quantize_rows<CodeElement>(pool, call, how);
  const int64_t row_bytes = x.ld * int64_t(sizeof(CodeElement));
  share_panels(pool, call, row_bytes,
               [&](const LinearGroup& group, Range rows, int64_t panel, int thread) {
                 const Int4Task<kGroup> task{*group.linear,
                                             make_output(call, group, rows, panel, thread),
                                             x.from(group.first)};
                 task.run(rows, panel);
               });
}

}  // namespace

void linear_int4(Pool& pool, const LinearCall& call) {
  if (call.any().group_size == 32)
    run<32>(pool, call);
  else
    run<64>(pool, call);
}

}  // namespace quire::QUIRE_ISA
