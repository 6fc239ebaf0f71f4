// The short causal convolution of each channel by itself, with bias and SiLU.
//
// A unit is 64 channels; as many as a register holds go at once. The tokens of a step are taken in
// blocks, in whatever sequences they are: weights are loaded once a block, and a sequence's last
// W - 1 inputs stay in registers for its tokens of the block. Legend: see state_abi.h.
#include <span>

#include "recurrence/states.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kUnitChannels = 64;
constexpr int64_t kUnitsPerTask = 8;
constexpr int64_t kBlockTokens = 32;  // of a task's channels: they stay in the first cache

// The factors of inputs, in fp32; after the last channel they may be anything.
struct Taps {
  float* taps;  // [W][stride], the oldest input's first
  float* bias;  // [stride]
  int64_t stride;
};

template <typename T>
inline part load_some(const T* x, int count) {
  return count == kPartLanes ? load_part(x) : load_part_n(x, count);
}

template <typename T>
inline void store_some(T* x, part y, int count) {
  if (count == kPartLanes)
    store(x, y);
  else
    store_n(x, y, count);
}

inline float as_float(float x) { return x; }
inline float as_float(uint16_t bits) { return to_float(bits); }

// Prepares the taps of channels [first, end).
template <int W, typename V>
void prepare_taps(const ShortConv& call, int64_t first, int64_t end, const Taps& to) {
  const V* weight = static_cast<const V*>(call.weight);
  const V* bias = static_cast<const V*>(call.bias);
  for (int i = 0; i < W; ++i) {
    float* taps = to.taps + i * to.stride;
    for (int64_t c = first; c < end; ++c) taps[c] = as_float(weight[c * W + i]);
  }
  for (int64_t c = first; c < end; ++c) to.bias[c] = bias ? as_float(bias[c]) : 0.0f;
}

// y / (1 + e^-y). The exponential is as in simd.h, without limits: above 87 the result is y, and
// below -88 it is that at -88, zero but for 5e-37. NaN stays NaN: max gives its second argument.
inline part silu(part y) {
  const part low = max(splat_part(-88.0f), y), x = max(-low, splat_part(-87.0f));
  const part shifted = fma(x, splat_part(1.44269504088896341f), splat_part(12582912.0f));
  const part n = shifted - splat_part(12582912.0f);
  part r = fma(n, splat_part(-0.693145751953125f), x);
  r = fma(n, splat_part(-1.42860682030941723e-6f), r);
  part p = splat_part(1.3981999e-3f);
  p = fma(p, r, splat_part(8.3333454e-3f));
  p = fma(p, r, splat_part(4.1665796e-2f));
  p = fma(p, r, splat_part(1.6666666e-1f));
  p = fma(p, r, splat_part(5.0000000e-1f));
  p = fma(p, r, splat_part(1.0f));
  p = fma(p, r, splat_part(1.0f));
  typedef uint32_t words __attribute__((vector_size(kRegisterBytes)));
  const part power = (part)((words)p + ((words)shifted << 23));  // the shift drops all but n
  return low / (splat_part(1.0f) + power);
}

// Channels [channel, channel + count) of a unit through the tokens of some pieces. Fetches what
// lies at the same place in the next unit.
template <int W, typename T>
inline void move_lanes(const StateLayer& layer, const ShortConv& call, const Taps& from,
                       std::span<const Piece> pieces, UnitPlace place, UnitPlace next,
                       int64_t channel, int count) {
  const T* x = static_cast<const T*>(call.x) + channel;
  T* out = static_cast<T*>(call.out) + channel;
  part taps[W], last[W];  // inputs, the oldest first, the token's own last
  for (int i = 0; i < W; ++i) taps[i] = load_part(from.taps + i * from.stride + channel);
  const part bias = load_part(from.bias + channel);
  for (const Piece& piece : pieces) {
    float* s = place.of(layer, piece.blocks);
    const float* ahead = next.of(layer, piece.blocks);
    for (int i = 0; i + 1 < W; ++i) {
      __builtin_prefetch(ahead + i * kUnitChannels);
      last[i] = piece.is_fresh ? part{} : load_part(s + i * kUnitChannels);
    }
    for (int64_t t = piece.first; t < piece.end; ++t) {
      last[W - 1] = load_some(x + t * call.x_stride, count);
      part y = bias;
      for (int i = 0; i < W; ++i) y = fma(taps[i], last[i], y);
      if (call.has_silu) y = silu(y);
      store_some(out + t * call.num_channels, y, count);
      for (int i = 0; i + 1 < W; ++i) last[i] = last[i + 1];
    }
    if (piece.kept == piece.end)
      for (int i = 0; i + 1 < W; ++i) store(s + i * kUnitChannels, last[i]);
  }
}

// The units [first, end) through the pieces of a block.
template <int W, typename T>
void move_units(const StateLayer& layer, const ShortConv& call, const Taps& taps,
                std::span<const Piece> pieces, int64_t first, int64_t end) {
  UnitPlace place = place_of(layer, first);
  for (int64_t unit = first; unit < end; ++unit) {
    UnitPlace next = place_of(layer, smaller(unit + 1, layer.num_units - 1));
    const UnitPlace following = next;
    for (int64_t i = 0; i < kUnitChannels; i += kPartLanes) {
      const int64_t channel = unit * kUnitChannels + i;
      if (channel >= call.num_channels) break;
      const int count = int(smaller(kPartLanes, call.num_channels - channel));
      move_lanes<W, T>(layer, call, taps, pieces, place, next, channel, count);
      place.offset += kPartLanes * sizeof(float);
      next.offset += kPartLanes * sizeof(float);
    }
    place = following;
  }
}

// Cuts `count` pieces where blocks of tokens end, and before drafts, which stay together; returns
// how many there are then.
inline int64_t cut_in_blocks(const Piece* pieces, int64_t count, Piece* cut) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    Piece rest = pieces[i];
    for (; rest.first < rest.kept; rest.first = cut[found++].end, rest.is_fresh = false) {
      cut[found] = rest;
      cut[found].end = smaller(rest.kept, (rest.first / kBlockTokens + 1) * kBlockTokens);
      cut[found].kept = cut[found].end;
    }
    if (rest.first < rest.end) cut[found++] = rest;
  }
  return found;
}

template <int W, typename T>
void short_conv_as(Pool& pool, const StateLayer& layer, const StateStep& step,
                   const ShortConv& call) {
  const int64_t num_tokens = step.query_start[step.num_sequences], num_units = layer.num_units;
  const int64_t stride = num_units * kUnitChannels;
  auto* memory = static_cast<float*>(pool.shared(1, (W + 1) * stride * int64_t(sizeof(float))));
  const Taps taps{memory, memory + W * stride, stride};
  const int64_t most = 2 * step.num_sequences + num_tokens / kBlockTokens + 1;
  auto* pieces = static_cast<Piece*>(pool.shared(0, 2 * most * int64_t(sizeof(Piece))));
  const int64_t count = find_pieces(layer, step, 0, num_tokens, pieces + most);
  const std::span<const Piece> cut(pieces, cut_in_blocks(pieces + most, count, pieces));
  share(pool, 2, (num_units + kUnitsPerTask - 1) / kUnitsPerTask, [&](int64_t task, int) {
    const int64_t first = task * kUnitsPerTask, end = smaller(num_units, first + kUnitsPerTask);
    const int64_t stop = smaller(call.num_channels, end * kUnitChannels);
    if (call.weight_dtype == kBF16)
      prepare_taps<W, uint16_t>(call, first * kUnitChannels, stop, taps);
    else
      prepare_taps<W, float>(call, first * kUnitChannels, stop, taps);
    for (size_t i = 0, j = 0; i < cut.size(); i = j) {
      while (j < cut.size() && cut[j].first / kBlockTokens == cut[i].first / kBlockTokens) ++j;
      move_units<W, T>(layer, call, taps, cut.subspan(i, j - i), first, end);
    }
  });
}

template <typename T>
void short_conv_of(Pool& pool, const StateLayer& layer, const StateStep& step,
                   const ShortConv& call) {
  if (call.width == 2)
    short_conv_as<2, T>(pool, layer, step, call);
  else if (call.width == 3)
    short_conv_as<3, T>(pool, layer, step, call);
  else
    short_conv_as<4, T>(pool, layer, step, call);
}

}  // namespace

void short_conv(Pool& pool, const StateLayer& layer, const StateStep& step,
                const ShortConv& call) {
  if (call.dtype == kBF16)
    short_conv_of<uint16_t>(pool, layer, step, call);
  else
    short_conv_of<float>(pool, layer, step, call);
}

}  // namespace quire::QUIRE_ISA
