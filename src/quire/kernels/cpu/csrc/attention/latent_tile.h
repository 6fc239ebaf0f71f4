// A tile of latent layers: up to 256 tokens' vectors, as both products read them.
//
// A latent layer's page is [B][D], a token's vector after the other. A tile is found as units of
// sixteen tokens, which lie in one block or, in blocks of 8, in two.
#pragma once
#include "attention/latent_kernels.h"

namespace quire::QUIRE_ISA {

// A latent layer's pages, element type T: float, or uint16_t for bf16.
template <typename T>
struct LatentPages {
  uint8_t* pages;
  int64_t page_stride;  // bytes
  int head_dim;
  int block_shift;  // log2 B
  int run_tokens;   // min(B, 16): number of tokens of a unit that lie one after the other

  explicit LatentPages(const AttentionLayer& layer)
      : pages(layer.pages), page_stride(layer.page_stride), head_dim(layer.head_dim),
        block_shift(__builtin_ctz(unsigned(layer.block_size))),
        run_tokens(smaller(layer.block_size, 16)) {}

  T* token(int64_t block, int64_t offset) const {
    return reinterpret_cast<T*>(pages + block * page_stride) + offset * head_dim;
  }
  T* token_of_slot(int64_t slot) const {
    return token(slot >> block_shift, slot & ((int64_t(1) << block_shift) - 1));
  }
  const T* token_at(const int32_t* blocks, int position) const {
    return token(blocks[position >> block_shift], position & ((1 << block_shift) - 1));
  }
};

template <typename T>
struct LatentTile {
  int position;
  Range visible;  // to any row, cut to the tile
  int first_unit, end_unit;
  const char* runs[2 * kTileUnits];  // runs of run_tokens tokens that any row sees
  int num_runs;
  const T* units[kTileUnits];  // [16][D]; after `resolve`

  // Finds tile number `index`. Its rows see at most `range`.
  void find(const LatentPages<T>& pages, const int32_t* blocks, int index, Range range) {
    position = index * kTileTokens;
    visible.low = larger(range.low, position);
    visible.high = smaller(range.high, position + kTileTokens);
    if (visible.low >= visible.high) visible.high = visible.low = position;
    first_unit = (visible.low - position) / 16;
    end_unit = (visible.high - position + 15) / 16;
    num_runs = 0;
    for (int at = visible.low & -pages.run_tokens; at < visible.high; at += pages.run_tokens)
      runs[num_runs++] = reinterpret_cast<const char*>(pages.token_at(blocks, at));
  }

  // Makes units of the runs that were found. Vectors of tokens that no row sees may be anything,
  // also NaN, which a probability of 0 does not cancel. Units with such vectors, and units of two
  // blocks, are copied to room [256][D], with zeros for these vectors.
  void resolve(const LatentPages<T>& pages, T* room) {
    const int head_dim = pages.head_dim, run_tokens = pages.run_tokens;
    const int first_run = (visible.low & -run_tokens);
    for (int u = first_unit; u < end_unit; ++u) {
      const int start = position + 16 * u;
      const bool is_whole = start >= visible.low && start + 16 <= visible.high;
      if (is_whole && run_tokens == 16) {
        units[u] = reinterpret_cast<const T*>(runs[(start - first_run) / 16]);
        continue;
      }
      T* unit = room + int64_t(16) * u * head_dim;
      units[u] = unit;
      for (int i = 0; i < 16; ++i) {
        const int at = start + i;
        T* to = unit + int64_t(i) * head_dim;
        if (at < visible.low || at >= visible.high) {
          std::memset(to, 0, head_dim * sizeof(T));
          continue;
        }
        const T* run = reinterpret_cast<const T*>(runs[(at - first_run) / run_tokens]);
        std::memcpy(to, run + int64_t((at - first_run) % run_tokens) * head_dim,
                    head_dim * sizeof(T));
      }
    }
  }

  Fetcher fetcher(const LatentPages<T>& pages) const {
    return {runs, num_runs, int64_t(pages.run_tokens) * pages.head_dim * int64_t(sizeof(T)),
            nullptr, 0, 0, 0};
  }
};

// The vectors of a unit as the scores' product reads them; room: [16][D].
inline const float* unit_factors(const float* unit, int, float*) { return unit; }
inline const uint16_t* unit_factors(const uint16_t* unit, int, uint16_t*) { return unit; }
inline const float* unit_factors(const uint16_t* unit, int head_dim, float* room) {
  const int count = 16 * head_dim;  // a multiple of 16
  for (int i = 0; i < count; i += 16) store(room + i, load(unit + i));
  return room;
}

// Prepares dimensions [at, at + count) of a unit as values, [16 / kDepth][kSliceDims][kDepth];
// dimensions after the last, up to a multiple of sixteen, are 0.
template <typename T>
inline void fill_slice(FullMode, const T* unit, int head_dim, int at, int count, float* slice) {
  for (int token = 0; token < 16; ++token, slice += kSliceDims<FullMode>) {
    const T* from = unit + int64_t(token) * head_dim + at;
    int d = 0;
    for (; d + 16 <= count; d += 16) store(slice + d, load(from + d));
    if (d < count) store(slice + d, load_n(from + d, count - d));
  }
}

#if defined(__AVX512BF16__)
inline void fill_slice(DotMode, const uint16_t* unit, int head_dim, int at, int count,
                       uint16_t* slice) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int token = 0; token < 16; token += 2, slice += 2 * kSliceDims<DotMode>) {
    const uint16_t* even = unit + int64_t(token) * head_dim + at;
    const uint16_t* odd = even + head_dim;
    for (int d = 0; d < count; d += 32) {
      const int left = count - d;
      const __mmask32 mask = left >= 32 ? ~0u : (1u << left) - 1;
      const __m512i a = _mm512_maskz_loadu_epi16(mask, even + d);
      const __m512i b = _mm512_maskz_loadu_epi16(mask, odd + d);
      _mm512_storeu_si512(slice + 2 * d, _mm512_permutex2var_epi16(a, low, b));
      _mm512_storeu_si512(slice + 2 * d + 32, _mm512_permutex2var_epi16(a, high, b));
    }
  }
}
#endif

}  // namespace quire::QUIRE_ISA
