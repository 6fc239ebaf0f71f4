// Unpacks codes that lie several in a word, turned, as AWQ and GPTQ store them.
//
// A tile of words is a line of the cache wide; what it becomes is written a line at a time, too, so
// each is read and written once. Compiled once, for all instruction sets.
#include <algorithm>
#include <cstring>

#include "packing/pack.h"

namespace quire {
namespace {

constexpr int64_t kTileWords = 16, kTileInputs = 64;
constexpr uint64_t kLowFour = 0x0f0f0f0f0f0f0f0f;

void store_eight(uint8_t* to, uint64_t bytes) { std::memcpy(to, &bytes, 8); }

// The eight codes of a word, from its lowest bits up, a byte each.
uint64_t spread(uint32_t word) {
  uint64_t codes = word;
  codes = (codes | codes << 16) & 0x0000ffff0000ffff;
  codes = (codes | codes << 8) & 0x00ff00ff00ff00ff;
  return (codes | codes << 4) & kLowFour;
}

// Bytes [8][8], a row in each number, become bytes [8][8] of the columns.
void transpose(uint64_t* rows) {
  constexpr uint64_t kHalves = 0x00000000ffffffff, kPairs = 0x0000ffff0000ffff,
                     kBytes = 0x00ff00ff00ff00ff;
  const auto exchange = [rows](int distance, int shift, uint64_t mask) {
    for (int i = 0; i < 8; ++i) {
      if ((i & distance) != 0) continue;
      const uint64_t low = rows[i], high = rows[i + distance];
      rows[i] = (low & mask) | (high & mask) << shift;
      rows[i + distance] = (low >> shift & mask) | (high & ~mask);
    }
  };
  exchange(4, 32, kHalves);
  exchange(2, 16, kPairs);
  exchange(1, 8, kBytes);
}

// A word has inputs of one output; `words` of them stand below each other.
void unpack_inputs(const uint32_t* words, int64_t ld, int64_t num_words, int32_t width,
                   uint8_t* codes) {
  for (int64_t i = 0; i < num_words; ++i) {
    const uint32_t word = words[i * ld];
    if (width == 8)
      std::memcpy(codes + i * 4, &word, 4);
    else
      store_eight(codes + i * 8, spread(word));
  }
}

// Two words side by side have sixteen outputs of one input. Unpacks `num_inputs` inputs, a multiple
// of 8, of num_words columns of the tile (1 or 2). K: from an output's codes to the next output's.
void unpack_outputs(const uint32_t* columns, int64_t num_words, int64_t num_inputs,
                    const int32_t* order, int64_t K, uint8_t* codes) {
  for (int64_t k = 0; k < num_inputs; k += 8) {
    uint64_t pairs[8];
    for (int j = 0; j < 8; ++j) std::memcpy(pairs + j, columns + (k + j) * kTileWords, 8);
    transpose(pairs);
    for (int i = 0; i < 4 * num_words; ++i) {  // byte i of the words, of eight inputs
      uint8_t* to = codes + i / 4 * 8 * K + k;
      const int32_t* outputs = order + i % 4 * 2;
      store_eight(to + outputs[0] * K, pairs[i] & kLowFour);
      store_eight(to + outputs[1] * K, pairs[i] >> 4 & kLowFour);
    }
  }
}

}  // namespace

void unpack_words(const uint32_t* words, int64_t ld, int64_t num_rows, int64_t num_columns,
                  int32_t width, const int32_t* order, uint8_t* codes) {
  const int64_t in_word = 32 / width;
  const int64_t K = order == nullptr ? num_rows * in_word : num_rows;
  const int64_t step = order == nullptr ? kTileInputs / in_word : kTileInputs;
  for (int64_t row = 0; row < num_rows; row += step) {
    const int64_t rows = std::min(step, num_rows - row);
    for (int64_t column = 0; column < num_columns; column += kTileWords) {
      const int64_t columns = std::min(kTileWords, num_columns - column);
      const uint32_t* from = words + row * ld + column;
      if (order == nullptr) {
        for (int64_t i = 0; i < columns; ++i)
          unpack_inputs(from + i, ld, rows, width, codes + (column + i) * K + row * in_word);
        continue;
      }
      // Rows of a tensor may be multiples of 4 KiB apart, and a cache holds few such lines.
      uint32_t tile[kTileInputs * kTileWords] = {};
      for (int64_t i = 0; i < rows; ++i)
        std::memcpy(tile + i * kTileWords, from + i * ld, size_t(columns) * 4);
      for (int64_t i = 0; i < columns; i += 2)
        unpack_outputs(tile + i, std::min<int64_t>(2, columns - i), rows, order, K,
                       codes + (column + i) * in_word * K + row);
    }
  }
}

}  // namespace quire
