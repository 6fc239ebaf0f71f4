// The short causal convolution of each channel by itself, with bias and SiLU.
//
// A unit is 64 channels; a register holds 16, and its last W - 1 inputs stay in registers for all
// tokens of a piece. Legend: see state_abi.h.
#include "recurrence/states.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kUnitChannels = 64;
constexpr int64_t kUnitsPerTask = 8;

template <typename T>
inline vf load_some(const T* x, int count) {
  return count == kLanes ? load(x) : load_n(x, count);
}

template <typename T>
inline void store_some(T* x, vf y, int count) {
  if (count == kLanes)
    store(x, y);
  else
    store_n(x, y, count);
}

// Channels [channel, channel + count) through all tokens of a piece; their state begins at s.
template <int W, typename T>
void move_lanes(const ShortConv& call, const Piece& piece, float* s, int64_t channel, int count) {
  const T* x = static_cast<const T*>(call.x) + channel;
  T* out = static_cast<T*>(call.out) + channel;
  vf taps[W], last[W];  // of inputs the oldest first, the token's own behind
  for (int i = 0; i < W; ++i)
    taps[i] = load_some(call.weight + i * int64_t(call.num_channels) + channel, count);
  for (int i = 0; i + 1 < W; ++i) last[i] = piece.is_fresh ? vf{} : load(s + i * kUnitChannels);
  const vf bias = load_some(call.bias + channel, count);
  for (int64_t t = piece.first; t < piece.end; ++t) {
    last[W - 1] = load_some(x + t * call.x_stride, count);
    vf y = bias;
    for (int i = 0; i < W; ++i) y = fma(taps[i], last[i], y);
    if (call.has_silu) y = y / (splat(1.0f) + exp(-y));
    store_some(out + t * call.num_channels, y, count);
    for (int i = 0; i + 1 < W; ++i) last[i] = last[i + 1];
  }
  for (int i = 0; i + 1 < W; ++i) store(s + i * kUnitChannels, last[i]);
}

template <int W, typename T>
void move_unit(const StateLayer& layer, const ShortConv& call, const Piece& piece, int64_t unit) {
  float* s = unit_at(layer, piece.blocks, unit);
  for (int64_t i = 0; i < kUnitChannels; i += kLanes) {
    const int64_t channel = unit * kUnitChannels + i;
    if (channel >= call.num_channels) break;
    const int count = int(smaller(kLanes, call.num_channels - channel));
    move_lanes<W, T>(call, piece, s + i, channel, count);
  }
}

template <int W, typename T>
void short_conv_as(Pool& pool, const StateLayer& layer, const StateStep& step,
                   const ShortConv& call) {
  auto* pieces = static_cast<Piece*>(pool.shared(0, (step.num_sequences + 1) * sizeof(Piece)));
  const int64_t num_tokens = step.query_start[step.num_sequences];
  const int64_t count = find_pieces(layer, step, 0, num_tokens, pieces);
  const int64_t num_runs = (layer.num_units + kUnitsPerTask - 1) / kUnitsPerTask;
  pool.parallel(count * num_runs, [&](int64_t task, int) {
    const int64_t first = task % num_runs * kUnitsPerTask;
    const int64_t end = smaller(layer.num_units, first + kUnitsPerTask);
    for (int64_t unit = first; unit < end; ++unit)
      move_unit<W, T>(layer, call, pieces[task / num_runs], unit);
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
