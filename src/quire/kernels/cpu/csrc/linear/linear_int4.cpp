// Linears with int4 weights in groups and int8 activations.
//
// Layout and formula: linear_int4.h; activations: quantize_rows.h. For a row m and an output n
//
//   result[m, n]  = (S[n] * scaled - O[n] * offsets) * x_scale[m]
//   scaled        = sum over g of s[n, g] * (sum over the group of q[n, k] * x[m, k])    fp32
//   offsets       = sum over g of o[n, g] * (sum over the group of x[m, k])              exact
//
// where the inner sums are exact and the outer one of `scaled` is in the order of the groups, one
// rounding for each. Weights are taken from the halves of bytes where they are multiplied, once for
// all rows of a tile: unpacking them beforehand was slower however many rows use them (Zen 4).
#include "linear/linear_int4.h"

#include <utility>

#include "linear/dot.h"
#include "linear/epilogue.h"
#include "linear/quantize_rows.h"
#include "linear/panel_task.h"
#include "threads/work_stealing.h"

namespace quire::QUIRE_ISA {
namespace {

// As in linear_int8.cpp; the loop takes longer, so fewer rows need requests of ours.
constexpr int64_t kMinFetchedRows = 4;
constexpr int64_t kAheadBytes = 8192;
constexpr int kUnit = int(kUnitOutputs);
constexpr int kPanel = int(kPanelOutputs);
// A row of a tile takes four registers: two integer sums, for the low and the high halves, `scaled`
// and `offsets`.
constexpr int kMaxRows = kIntLanes == 16 ? 6 : 2;

// Some rows of x, and their sums over groups.
struct Rows {
  const DotElement* x;
  int64_t ldx;
  const int16_t* group_sums;
  int64_t num_groups;

  // In all lanes, the sums of groups 2 * pair and the next.
  DotInts pair_sums(int r, int64_t pair) const {
    return DotInts{} + load_as<int32_t>(group_sums + r * num_groups + pair * 2);
  }
};

// What is summed for some rows: [rows, 32] each.
struct Sums {
  float* scaled;
  int32_t* offsets;

  Sums from(int lane) const { return {scaled + lane, offsets + lane}; }
};

inline DotFloats multiply_add(DotFloats a, DotFloats b, DotFloats c) {
#if defined(__AVX512F__)
  return (DotFloats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (DotFloats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// The packed form of a pair of groups.
template <int kGroup>
struct PackedPair {
  static constexpr int kGroupBytes = kGroup * kUnit / 2;
  static constexpr int kBytes = int(kInt4HeaderBytes) + 2 * kGroupBytes;
  const uint8_t* data;

  const uint8_t* scales(int g) const { return data + g * kUnit; }
  const uint8_t* offsets() const { return data + 2 * kUnit; }
  const uint8_t* halves(int g) const { return data + kInt4HeaderBytes + g * kGroupBytes; }
};

// scaled [R] += one group of R rows. The high halves of bytes are not shifted down, as their sum is
// a multiple of 16.
template <int R, int kGroup>
inline void add_group(const uint8_t* halves, DotFloats scale, const DotElement* x, int64_t ldx,
                      DotFloats (&scaled)[R]) {
  DotInts low[R] = {}, high[R] = {};
#pragma GCC unroll 8
  for (int k = 0; k < kGroup; k += 8) {
    const auto bytes = load_as<DotInts>(halves + k * kUnit / 2);
    const DotWeights low_halves(bytes & 0x0f0f0f0f), high_halves(bytes & int32_t(0xf0f0f0f0));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      low[r] = dot(low[r], low_halves, DotInput(x + r * ldx + k));
      high[r] = dot(high[r], high_halves, DotInput(x + r * ldx + k + 4));
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
    scaled[r] = multiply_add(to_floats(low[r] + (high[r] >> 4)), scale, scaled[r]);
}

// sums [R, 16 of 32] of a unit.
template <int R, int kGroup>
void multiply_unit(const uint8_t* unit, int64_t num_pairs, const Rows& rows, Prefetch prefetch,
                   const Sums& sums) {
  prefetch.spread(num_pairs * (kUnit / kIntLanes));
  for (int lane = 0; lane < kUnit; lane += kIntLanes) {
    DotFloats scaled[R] = {};
    DotInts offsets[R] = {};
    PackedPair<kGroup> pair{unit};
    for (int64_t i = 0; i < num_pairs; ++i, pair.data += pair.kBytes) {
      prefetch.step();
      const DotInts o = widen_byte_pairs(pair.offsets() + lane * 2);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) offsets[r] = dot_pairs(offsets[r], o, rows.pair_sums(r, i));
#pragma GCC unroll 2
      for (int g = 0; g < 2; ++g)
        add_group<R, kGroup>(pair.halves(g) + lane * 4,
                             to_floats(widen_bytes(pair.scales(g) + lane)),
                             rows.x + (i * 2 + g) * kGroup, rows.ldx, scaled);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      std::memcpy(sums.scaled + r * kPanel + lane, &scaled[r], sizeof scaled[r]);
      std::memcpy(sums.offsets + r * kPanel + lane, &offsets[r], sizeof offsets[r]);
    }
  }
}

using MultiplyUnit = void (*)(const uint8_t*, int64_t, const Rows&, Prefetch, const Sums&);

// The functions of R = 1 .. kMaxRows.
template <int kGroup, int... kRs>
MultiplyUnit choose_among(int64_t num_rows, std::integer_sequence<int, kRs...>) {
  static constexpr MultiplyUnit kFunctions[] = {&multiply_unit<kRs + 1, kGroup>...};
  return kFunctions[num_rows - 1];
}

template <int kGroup>
MultiplyUnit choose(int64_t num_rows) {
  return choose_among<kGroup>(num_rows, std::make_integer_sequence<int, kMaxRows>{});
}

template <int kGroup>
struct Int4Task {
  const Weights& linear;
  Output output;
  QuantizedRows x;

  void run(Range rows, int64_t panel) const {
    const int64_t unit_bytes = int4_unit_bytes(linear), num_bytes = 2 * unit_bytes;
    const uint8_t* weights = static_cast<const uint8_t*>(linear.weights) + panel * num_bytes;
    const int64_t num_blocks = divide_up(rows.size(), kMaxRows);
    const int64_t ahead = num_blocks == 1 ? kAheadBytes : num_bytes;
    const int64_t num_lines = rows.size() < kMinFetchedRows ? 0 : num_bytes / kLineBytes;
    alignas(64) float scaled[kMaxRows * kPanel];
    alignas(64) int32_t offsets[kMaxRows * kPanel];
    const Sums sums{scaled, offsets};
    for (int64_t i = 0; i < num_blocks; ++i) {
      const Range block = rows.part(i, num_blocks);
      for (int unit = 0; unit < 2; ++unit) {
        const Range lines = Range{0, num_lines}.part(i * 2 + unit, num_blocks * 2);
        choose<kGroup>(block.size())(
            weights + unit * unit_bytes, int4_group_pairs(linear), rows_from(block.first),
            Prefetch(weights + ahead + lines.first * kLineBytes, lines.size()),
            sums.from(unit * kUnit));
      }
      for (int64_t m = block.first; m < block.end; ++m)
        finish(m, panel, sums.from(int(m - block.first) * kPanel));
    }
  }

 private:
  Rows rows_from(int64_t m) const {
    return {x.data + m * x.ld, x.ld, x.group_sums + m * x.num_groups, x.num_groups};
  }

  void finish(int64_t m, int64_t panel, const Sums& sums) const {
    const float* S = linear.scales + panel * kPanel;
    const float* O = S + padded_outputs(linear);
    vf results[2];
#pragma GCC unroll 2
    for (int lane = 0; lane < kPanel; lane += kUnit) {
      const vf offsets = __builtin_convertvector(load_as<vi>(sums.offsets + lane), vf);
      const vf above = load(S + lane) * load(sums.scaled + lane);
      results[lane / kUnit] = (above - load(O + lane) * offsets) * splat(x.scales[m]);
    }
    finish_panel(output, m, panel, results[0], results[1]);
  }
};

template <int kGroup>
void run(Pool& pool, const LinearCall& call) {
  const int64_t padded = int4_group_pairs(call.any()) * 2 * kGroup;
  const QuantizedRows x = quantize_rows(pool, call, padded, kGroup);
  const int64_t row_bytes = x.ld * int64_t(sizeof(DotElement));
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
