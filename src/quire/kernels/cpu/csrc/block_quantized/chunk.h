// Chunks of codes as the bytes that dot.h and dot_codes.h multiply.
#pragma once
#include <algorithm>

#include "block_quantized/layout.h"
#include "linear/dot_codes.h"
#include "linear/row_sums.h"

namespace quire::QUIRE_ISA {

// kNarrowTable: a table whose values are at most 31 apart; chosen only where kHasByteSums.
enum class CodeKind { k4, kTable, kNarrowTable, k5, k6, k8 };

constexpr int width_of(CodeKind kind) {
  return kind == CodeKind::k5 ? 5 : kind == CodeKind::k6 ? 6 : kind == CodeKind::k8 ? 8 : 4;
}

// The largest byte of a chunk, for ByteDot and ElementOf.
constexpr int largest_of(CodeKind kind) {
  return kind == CodeKind::k4                                       ? 15
         : kind == CodeKind::k5 || kind == CodeKind::kNarrowTable ? 31
         : kind == CodeKind::k6                                   ? 63
                                                                  : 255;
}

// Whether codes are of kNarrowTable.
inline bool is_narrow(const CodeFormat& code_format) {
  const int8_t* table = code_format.table;
  if (!kHasByteSums || table == nullptr || code_format.block != 0) return false;
  const auto ends = std::minmax_element(table, table + 16);
  return *ends.second - *ends.first <= largest_of(CodeKind::kNarrowTable);
}

// The number that is added to a table's values, so that they fit the bytes that products read.
inline int32_t table_bias(const CodeFormat& code_format) {
  const int8_t* table = code_format.table;
  return is_narrow(code_format) ? -*std::min_element(table, table + 16) : kByteBias;
}

// Sixteen bytes, repeated over a register: the value of each code, plus table_bias.
struct CodeTable {
  DotInts bytes;

  explicit CodeTable(const CodeFormat& code_format) : bytes{} {
    if (code_format.table == nullptr) return;
    const int32_t bias = table_bias(code_format);
    uint8_t repeated[sizeof bytes];
    for (size_t i = 0; i < sizeof bytes; ++i)
      repeated[i] = uint8_t(code_format.table[i % 16] + bias);
    std::memcpy(&bytes, repeated, sizeof bytes);
  }

  // Each byte of codes, 0 .. 15, becomes its entry.
  DotInts look_up(DotInts codes) const {
#if defined(__AVX512BW__)
    return (DotInts)_mm512_shuffle_epi8((__m512i)bytes, (__m512i)codes);
#elif defined(__AVX2__)
    return (DotInts)_mm256_shuffle_epi8((__m256i)bytes, (__m256i)codes);
#elif defined(__aarch64__)
    return (DotInts)vqtbl1q_u8((uint8x16_t)bytes, (uint8x16_t)codes);
#else
    uint8_t entries[sizeof bytes], found[sizeof bytes];
    std::memcpy(entries, &bytes, sizeof bytes);
    std::memcpy(found, &codes, sizeof codes);
    for (uint8_t& byte : found) byte = entries[byte];
    return load_as<DotInts>(found);
#endif
  }
};

// 32 inputs of kIntLanes outputs.
template <CodeKind kKind>
class Chunk {
 public:
  static constexpr int kBytes = width_of(kKind) * int(kVectorBytes);
  const uint8_t* const data;  // of the first of these outputs

  Chunk(const uint8_t* first, const CodeTable& table) : data(first), table_(table) {}

  // The bytes of inputs 4q .. 4q + 3: codes, as stored, or entries of the table.
  DotInts bytes(int q) const {
    if constexpr (kKind == CodeKind::k8) return vector(q);
    const DotInts pair = vector(q / 2);
    const DotInts low = q % 2 == 0 ? pair & 0x0f0f0f0f : high_halves(pair);
    if constexpr (kKind == CodeKind::kTable || kKind == CodeKind::kNarrowTable)
      return table_.look_up(low);
    if constexpr (kKind == CodeKind::k5) return low | (moved(vector(4), 4 - q) & 0x10101010);
    if constexpr (kKind == CodeKind::k6)
      return low | (moved(vector(4 + q / 4), 4 - q % 4 * 2) & 0x30303030);
    return low;
  }

 private:
  // With 16 registers, in_order keeps g++ from loading it once for each use: the queue of loads
  // bounds how far ahead the processor reads.
  DotInts vector(int i) const {
    const auto loaded = load_as<DotInts>(data + i * kVectorBytes);
    return kHasHalves ? in_order(loaded) : loaded;
  }

  // Bits that move from a byte to its neighbour are masked by the caller.
  static DotInts moved(DotInts bits, int left) { return left >= 0 ? bits << left : bits >> -left; }

  const CodeTable& table_;
};

// sums = the rows' corrections, and the products of quads [kFirst, kEnd) of U registers' chunks
// with x; rows and corrections begin `ld` bytes apart.
template <int kFirst, int kEnd, int R, int U, CodeKind kKind>
inline void sum_chunk(const Chunk<kKind> (&chunks)[U], const uint8_t* x,
                      const uint8_t* corrections, int64_t ld, RowSums<R, U>& sums) {
  constexpr int kLargest = largest_of(kKind), kQuads = kEnd - kFirst;
  x += kFirst * 4 * sizeof(ElementOf<kLargest>);
  if constexpr (kTakesBytes<kLargest>) {
    using Dot = ByteDot<kLargest>;
    sum_quads<Dot, kQuads, R>(
        [&](int u, int q) { return Dot::stored(chunks[u].bytes(kFirst + q)); }, x, corrections, ld,
        sums.of);
  } else {
    sums.start([&](int r) { return all_lanes(corrections + r * ld); });
    const auto load_quad = [&](int q, DotInts (&to)[U]) {
      if constexpr (kKind == CodeKind::k8 && kIntLanes < kUnitOutputs) {
        load_registers(chunks[0].data + (kFirst + q) * kVectorBytes, to);
        return;
      }
#pragma GCC unroll 4
      for (int u = 0; u < U; ++u) to[u] = chunks[u].bytes(kFirst + q);
    };
    sums.template add<kQuads>(load_quad, x, ld);
    sums.finish();
  }
}

inline DotFloats all_lanes_float(const uint8_t* p) { return (DotFloats)all_lanes(p); }

// fp16, one to a lane.
inline DotFloats widen_fp16(const uint8_t* p) {
#if defined(__AVX512F__)
  return (DotFloats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (DotFloats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
  return (DotFloats)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
#else
  DotInts bits{};
  for (int i = 0; i < kIntLanes; ++i) bits[i] = load_as<uint16_t>(p + i * 2);
  const DotInts magnitude = bits & 0x7fff;
  // The exponent is 112 short; a number without one becomes right by the multiplication too.
  const DotInts finite = (DotInts)((DotFloats)(magnitude << 13) * 0x1p112f);
  const DotInts is_special = magnitude >= 0x7c00;
  const DotInts special = (magnitude << 13) | 0x7f800000;
  return (DotFloats)((is_special & special) | (~is_special & finite) | (bits & 0x8000) << 16);
#endif
}

// bf16, one to a lane.
inline DotFloats widen_bf16(const uint8_t* p) {
#if defined(__AVX512BW__)
  const __m256i bits = _mm256_loadu_si256((const __m256i*)p);
  return (DotFloats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
#elif defined(__AVX2__)
  const __m128i bits = _mm_loadu_si128((const __m128i*)p);
  return (DotFloats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
#elif defined(__aarch64__)
  return (DotFloats)vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16);
#else
  DotInts bits{};
  for (int i = 0; i < kIntLanes; ++i) bits[i] = load_as<uint16_t>(p + i * 2);
  return (DotFloats)(bits << 16);
#endif
}

// A signed byte to a lane.
inline DotInts widen_signed_bytes(const uint8_t* p) {
#if defined(__AVX512BW__)
  return (DotInts)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  return (DotInts)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#elif defined(__aarch64__)
  const auto four = vreinterpret_s8_s32(vdup_n_s32(load_as<int32_t>(p)));
  return (DotInts)vmovl_s16(vget_low_s16(vmovl_s8(four)));
#else
  return DotInts{int8_t(p[0]), int8_t(p[1]), int8_t(p[2]), int8_t(p[3])};
#endif
}

}  // namespace quire::QUIRE_ISA
