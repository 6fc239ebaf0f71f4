// A tile: up to 256 keys of one KV head.
//
// It begins at an absolute position, and is found through the block table as units of sixteen
// tokens. Keys that no row of the piece sees are not read, or are masked.
#pragma once
#include "attention/attention_kernels.h"

namespace quire::QUIRE_ISA {

// Visible positions [low, high).
struct Range {
  int32_t low, high;
};

inline int smaller(int a, int b) { return a < b ? a : b; }
inline int larger(int a, int b) { return a > b ? a : b; }

// The memory of one sequence's K and V of one head.
template <typename T>
struct KVSource {
  KVPages<T> kv;
  const int32_t* blocks;  // the sequence's row of the block table
  int head;

  // K of the unit of the page layout that holds `position`; V is half_elements further.
  const T* unit_at(int position) const {
    const int offset = position & ((1 << kv.block_shift) - 1);
    return kv.key_unit(blocks[position >> kv.block_shift], head, offset);
  }

  // For quantized pages: K's scale of `position`. V's scale is block_size entries further.
  const uint16_t* scales_at(int position) const {
    const int offset = position & ((1 << kv.block_shift) - 1);
    return kv.key_scales(blocks[position >> kv.block_shift], head, offset);
  }
};

// keys, values: of units [first_unit, end_unit), sixteen tokens each. Entries of keys outside of
// that range repeat a neighbour, so that units can be read in groups.
//
// With few rows, memory limits the speed of a tile. So units are prefetched some units ahead, in
// the order in which they are read (keys, values, keys of the next tile): next_keys[u] while the
// keys of unit u are read, next_values[u] with its values, and `between` while neither is read.
template <typename T>
struct Tile {
  static constexpr int kAhead = 16;   // units; two or four KiB each
  static constexpr int kBetween = 4;  // units
  static constexpr bool kIsQuantized = sizeof(T) == 1;
  static constexpr int kPair = sizeof(T) == 4 ? 1 : sizeof(T) == 2 ? 2 : 4;

  int position;
  int first_unit, end_unit;
  Range visible;  // to any row, cut to the tile
  const T* keys[kTileUnits];
  const T* values[kTileUnits];
  const T* next_keys[kTileUnits];
  const T* next_values[kTileUnits];
  const T* between[kBetween];
  T* edges;     // room for the values of 2 units; for K and V of a tile where pages' units are 8
  bool joined;  // out of units of 8
  // For quantized pages: the scales of each unit's sixteen tokens, and room for the scales of
  // joined units.
  const uint16_t* key_scales[kIsQuantized ? kTileUnits : 1];
  const uint16_t* value_scales[kIsQuantized ? kTileUnits : 1];
  uint16_t joined_scales[kIsQuantized ? kTileUnits : 1][2][16];

  static int64_t edge_elements(int unit, int head_dim) {
    return int64_t(16) * head_dim * (unit < 16 ? 2 * kTileUnits : 2);
  }

  // Finds tile number `index` of source. Its rows see at most `range`.
  void find(const KVSource<T>& source, int index, Range range) {
    position = index * kTileTokens;
    visible.low = larger(range.low, position);
    visible.high = smaller(range.high, position + kTileTokens);
    if (visible.low >= visible.high) visible.high = visible.low = position;
    first_unit = (visible.low - position) / 16;
    end_unit = (visible.high - position + 15) / 16;
    joined = source.kv.unit < 16;
    if (joined) {
      join_halves(source);
    } else {
      for (int u = first_unit; u < end_unit; ++u) {
        keys[u] = source.unit_at(position + 16 * u);
        values[u] = keys[u] + source.kv.half_elements;
      }
    }
    if (first_unit == end_unit) return;
    for (int u = 0; u < first_unit; ++u) keys[u] = keys[first_unit];
    for (int u = end_unit; u < kTileUnits; ++u) keys[u] = keys[end_unit - 1];
    if constexpr (kIsQuantized) find_scales(source);
  }

  // Lets this tile's reads prefetch the following units, up to the values of `next`, or its own
  // values if null.
  void look_ahead(const Tile* next) {
    const int num_units = end_unit - first_unit;
    if (num_units == 0) return;
    const T* units[4 * kTileUnits];
    int count = 0;
    for (int u = first_unit; u < end_unit; ++u) units[count++] = keys[u];
    for (int u = first_unit; u < end_unit; ++u) units[count++] = values[u];
    for (int u = next ? next->first_unit : 0; next && u < next->end_unit; ++u)
      units[count++] = next->keys[u];
    for (int u = next ? next->first_unit : 0; next && u < next->end_unit; ++u)
      units[count++] = next->values[u];
    for (int u = 0; u < kTileUnits; ++u) next_keys[u] = next_values[u] = keys[u];
    for (int i = 0; i < num_units; ++i) {
      // The first keys are fetched while the units fetched with the last tile's values still
      // arrive.
      if (i >= kBetween) next_keys[first_unit + i] = units[smaller(i + kAhead, count - 1)];
      const int later = num_units + i + kAhead + kBetween;
      next_values[first_unit + i] = units[smaller(later, count - 1)];
    }
    for (int i = 0; i < kBetween; ++i)
      between[i] = units[smaller(num_units + kAhead + i, count - 1)];
  }

  // Part `part` of `num_parts` of fetching `between`.
  void fetch_between(int head_dim, int part, int num_parts) const {
    const int line = 64 / sizeof(T), num_lines = 16 * head_dim / line;
    for (const T* unit : between)
      for (int i = num_lines * part / num_parts; i < num_lines * (part + 1) / num_parts; ++i)
        prefetch(unit + i * line);
  }

  // Values of keys that no row sees may be anything, also NaN, which a probability of 0 does not
  // cancel: replaces them by 0. Only the first and the last unit can have such keys. Codes are
  // numbers.
  void clear_edges(int head_dim) {
    if (kIsQuantized || joined || first_unit == end_unit) return;
    clear_edge(first_unit, head_dim, edges);
    if (end_unit - 1 != first_unit) clear_edge(end_unit - 1, head_dim, edges + 16 * head_dim);
  }

 private:
  // Scales are fetched while the previous tile is computed.
  void find_scales(const KVSource<T>& source) {
    for (int u = first_unit; u < end_unit; ++u) {
      if (joined) {
        join_scales(source, u);
        continue;
      }
      key_scales[u] = source.scales_at(position + 16 * u);
      value_scales[u] = key_scales[u] + source.kv.block_size;
      prefetch(key_scales[u]);
      prefetch(value_scales[u]);
    }
    for (int u = 0; u < kTileUnits; ++u) {
      const int known = smaller(larger(u, first_unit), end_unit - 1);
      key_scales[u] = key_scales[known];
      value_scales[u] = value_scales[known];
    }
  }

  void join_scales(const KVSource<T>& source, int u) {
    for (int half = 0; half < 2; ++half) {
      const int start = position + 16 * u + 8 * half;
      const bool is_seen = start + 8 > visible.low && start < visible.high;
      const uint16_t* from = is_seen ? source.scales_at(start) : nullptr;
      for (int part = 0; part < 2; ++part) {
        uint16_t* to = joined_scales[u][part] + 8 * half;
        if (from) std::memcpy(to, from + part * source.kv.block_size, 8 * sizeof(uint16_t));
        else std::memset(to, 0, 8 * sizeof(uint16_t));
      }
    }
    key_scales[u] = joined_scales[u][0];
    value_scales[u] = joined_scales[u][1];
  }

  void clear_edge(int u, int head_dim, T* room) {
    const int start = position + 16 * u;
    const int first = larger(visible.low - start, 0), end = smaller(visible.high - start, 16);
    if ((first == 0 && end == 16) || values[u] == room) return;
    copy_values(values[u], 16, head_dim, first, end, room);
    values[u] = room;
  }

  // Copies tokens [first, end) of a unit of `unit` tokens' values, and zeros for the others.
  static void copy_values(const T* from, int unit, int head_dim, int first, int end, T* to) {
    for (int token = 0; token < unit; token += kPair) {
      const int64_t row = int64_t(token) * head_dim;
      const bool even = token >= first && token < end;
      const bool odd = token + 1 >= first && token + 1 < end;
      if constexpr (kIsQuantized) {
        std::memcpy(to + row, from + row, int64_t(kPair) * head_dim);
      } else if constexpr (kPair == 1) {
        if (even) std::memcpy(to + row, from + row, head_dim * sizeof(T));
        else std::memset(to + row, 0, head_dim * sizeof(T));
      } else {
        const uint32_t mask = (even ? 0x0000ffffu : 0) | (odd ? 0xffff0000u : 0);
        for (int d = 0; d < head_dim; ++d) {
          uint32_t pair;
          std::memcpy(&pair, from + row + 2 * d, 4);
          pair &= mask;
          std::memcpy(to + row + 2 * d, &pair, 4);
        }
      }
    }
  }

  // Pages with units of 8 tokens: two of them, from any blocks, make a unit of 16 here.
  void join_halves(const KVSource<T>& source) {
    const int head_dim = source.kv.head_dim;
    T* room = edges;
    for (int u = first_unit; u < end_unit; ++u, room += 32 * head_dim) {
      for (int half = 0; half < 2; ++half) {
        const int start = position + 16 * u + 8 * half;
        const int first = smaller(larger(visible.low - start, 0), 8);
        const int end = larger(smaller(visible.high - start, 8), 0);
        T* value_room = room + 16 * head_dim + 8 * half * head_dim;
        if (first >= end) {
          std::memset(value_room, 0, 8 * head_dim * sizeof(T));
          copy_keys(nullptr, half, head_dim, room);
          continue;
        }
        const T* from = source.unit_at(start);
        copy_keys(from, half, head_dim, room);
        copy_values(from + source.kv.half_elements, 8, head_dim, first, end, value_room);
      }
      keys[u] = room;
      values[u] = room + 16 * head_dim;
    }
  }

  // from: [D / kPair][8][kPair], to: the half of [D / kPair][16][kPair]; null: zeros.
  static void copy_keys(const T* from, int half, int head_dim, T* to) {
    constexpr int kRow = 8 * kPair;
    for (int row = 0; row < head_dim / kPair; ++row) {
      T* half_row = to + (2 * row + half) * kRow;
      if (from) std::memcpy(half_row, from + row * kRow, kRow * sizeof(T));
      else std::memset(half_row, 0, kRow * sizeof(T));
    }
  }
};

}  // namespace quire::QUIRE_ISA
