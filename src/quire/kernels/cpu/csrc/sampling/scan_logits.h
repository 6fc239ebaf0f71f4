// Finds a line's largest logit and its k best tokens.
//
// Shared by sampling and log-probabilities: a line of logits is read once, in ranges that threads
// can take.
//
// Legend: V tokens of the vocabulary, k best of them, R lines.
#pragma once
#include "kernels_isa.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

// Tokens that one thread reads sooner than a second one has begun (about 3 us).
constexpr int64_t kRangeTokens = 16384;
constexpr float kNever = -__builtin_inff();

inline bool is_nan(float x) { return x != x; }
inline bool is_finite(float x) { return x - x == 0.0f; }
inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

// Bit i is set where a's lane i is greater than b's.
inline uint32_t greater_lanes(part a, part b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#elif defined(__AVX2__)
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ)));
#else
  const auto greater = a > b;
  uint64_t halves[2];
  std::memcpy(halves, &greater, sizeof halves);
  if ((halves[0] | halves[1]) == 0) return 0;
  uint32_t bits = 0;
  for (int lane = 0; lane < kPartLanes; ++lane) bits |= uint32_t(greater[lane] & 1) << lane;
  return bits;
#endif
}

inline part load_part(const float* p) {
  part x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// A register of logits; at the end of a line, its last n and then impossible ones.
inline part load_part(const float* p, int64_t n) {
  if (n >= kPartLanes) return load_part(p);
  float padded[kPartLanes];
  for (int lane = 0; lane < kPartLanes; ++lane) padded[lane] = lane < n ? p[lane] : kNever;
  return load_part(padded);
}

// Sixteen logits; at the end of a line, its last n and then impossible ones.
inline vf load_logits(const float* p, int64_t n) {
  if (n >= kLanes) return load(p);
  float padded[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) padded[lane] = lane < n ? p[lane] : kNever;
  return load(padded);
}

struct Largest {
  float value = kNever;
  int64_t token = -1;  // the lowest of those with this value
};

// The largest logit of tokens [first, end); a NaN counts as the largest.
inline Largest find_largest(const float* line, int64_t first, int64_t end) {
  constexpr int64_t kBlock = 64 * kLanes;
  float largest = line[first];
  int64_t block = first;
  for (int64_t start = first; start < end; start += kBlock) {
    const int64_t stop = min_of(end, start + kBlock);
    vf best[4] = {splat(kNever), splat(kNever), splat(kNever), splat(kNever)};
    vu broken = {};
    int64_t t = start;
    for (; t + 4 * kLanes <= stop; t += 4 * kLanes)
      for (int part = 0; part < 4; ++part) {
        const vf v = load(line + t + part * kLanes);
        broken |= ((vu)v & 0x7fffffffu) + 0x007fffffu;  // NaN alone sets the highest bit
        best[part] = max(best[part], v);
      }
    for (; t < stop; t += kLanes) {
      const vf v = load_logits(line + t, stop - t);
      broken |= ((vu)v & 0x7fffffffu) + 0x007fffffu;
      best[0] = max(best[0], v);
    }
    uint32_t bits = 0;
    for (int lane = 0; lane < kLanes; ++lane) bits |= broken[lane];
    if (bits >> 31)
      for (t = start;; ++t)
        if (is_nan(line[t])) return {line[t], t};
    const float of_block = reduce_max(max(max(best[0], best[1]), max(best[2], best[3])));
    if (of_block > largest) largest = of_block, block = start;
  }
  while (line[block] != largest) ++block;
  return {largest, block};
}

// The k best tokens seen, the worst of them on top of a heap. Of equal logits the lowest ids.
class BestTokens {
 public:
  // memory: [k], the first `size` of them a heap already. A NaN is not taken.
  BestTokens(uint64_t* memory, int64_t k, int64_t size = 0) : heap_(memory), k_(k), size_(size) {}

  // A larger logit has a larger key, of equal ones the lower token; 0 and -0 are equal.
  static uint64_t key(float logit, int64_t token) {
    const float value = logit + 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
    return uint64_t(bits) << 32 | uint32_t(~uint32_t(token));
  }
  static float logit(uint64_t key) {
    uint32_t bits = uint32_t(key >> 32);
    bits ^= bits >> 31 ? 0x80000000u : 0xffffffffu;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  static int64_t token(uint64_t key) { return uint32_t(~uint32_t(key)); }

  int64_t size() const { return size_; }
  uint64_t operator[](int64_t i) const { return heap_[i]; }
  // The logit that a token must exceed to be taken, if its id is above all earlier ids.
  float worst() const { return size_ < k_ ? kNever : logit(heap_[0]); }

  void add(uint64_t key) {
    if (size_ < k_) {
      int64_t i = size_++;
      for (; i > 0 && heap_[(i - 1) / 2] > key; i = (i - 1) / 2) heap_[i] = heap_[(i - 1) / 2];
      heap_[i] = key;
    } else if (key > heap_[0]) {
      replace_worst(key);
    }
  }

  // Tokens [first, end), all above those added before.
  void add_range(const float* line, int64_t first, int64_t end) {
    int64_t t = first;
    for (; t < end && size_ < k_; ++t)
      if (!is_nan(line[t])) add(key(line[t], t));
    for (; t < end; t += kPartLanes) {
      uint32_t lanes = greater_lanes(load_part(line + t, end - t), part{} + worst());
      for (; lanes; lanes &= lanes - 1) {
        const int64_t token = t + __builtin_ctz(lanes);
        add(key(line[token], token));
      }
    }
  }

  // Leaves the best first; nothing can be added afterwards.
  void sort() {
    const int64_t size = size_;
    while (size_ > 1) {
      const uint64_t worst = heap_[0], last = heap_[--size_];
      replace_worst(last);
      heap_[size_] = worst;
    }
    size_ = size;
  }

 private:
  void replace_worst(uint64_t key) {
    int64_t i = 0;
    for (int64_t child; (child = 2 * i + 1) < size_; i = child) {
      if (child + 1 < size_ && heap_[child + 1] < heap_[child]) ++child;
      if (heap_[child] >= key) break;
      heap_[i] = heap_[child];
    }
    heap_[i] = key;
  }

  uint64_t* heap_;
  int64_t k_;
  int64_t size_;
};

// Divides the work on one line: a thread takes the whole line, or all threads take ranges of it.
// The results must not depend on the choice. run(f) calls f(part, first token, end) for every part.
struct WholeLine {
  Pool& pool;
  int thread;
  int64_t V;

  int64_t num_parts() const { return 1; }
  void* memory(int64_t num_bytes) const { return pool.scratch(thread, num_bytes); }
  template <typename F>
  void run(F&& f) const {
    f(0, 0, V);
  }
};

struct LineInRanges {
  Pool& pool;
  int64_t V;

  int64_t num_parts() const { return (V + kRangeTokens - 1) / kRangeTokens; }
  void* memory(int64_t num_bytes) const { return pool.shared(0, num_bytes); }
  template <typename F>
  void run(F&& f) const {
    pool.parallel(num_parts(), [&](int64_t part, int) {
      f(part, part * kRangeTokens, min_of(V, (part + 1) * kRangeTokens));
    });
  }
};

// Data that the parts of a line leave for each other: a cache line each, and k keys each.
template <typename Division>
class LineMemory {
 public:
  LineMemory(const Division& division, int64_t k)
      : parts_(division.memory(division.num_parts() * (64 + k * int64_t(sizeof(uint64_t))))),
        keys_(static_cast<uint64_t*>(parts_) + 8 * division.num_parts()),
        k_(k) {}

  template <typename Part>
  Part* parts() const {
    static_assert(sizeof(Part) == 64);
    return static_cast<Part*>(parts_);
  }
  uint64_t* keys(int64_t part) const { return keys_ + part * k_; }
  int64_t k() const { return k_; }

 private:
  void* parts_;
  uint64_t* keys_;
  int64_t k_;
};

struct alignas(64) ScannedPart {
  Largest largest;
  int64_t num_best;
};

struct Scan {
  Largest largest;
  BestTokens best;
};

// A line's largest logit and its best memory.k() tokens.
template <typename Division>
Scan scan(const Division& division, const LineMemory<Division>& memory, const float* line) {
  auto* parts = memory.template parts<ScannedPart>();
  division.run([&](int64_t part, int64_t first, int64_t end) {
    BestTokens best(memory.keys(part), memory.k());
    if (memory.k() > 0) best.add_range(line, first, end);
    parts[part] = {find_largest(line, first, end), best.size()};
  });
  Scan all{parts[0].largest, BestTokens(memory.keys(0), memory.k(), parts[0].num_best)};
  for (int64_t part = 1; part < division.num_parts(); ++part) {
    const Largest& largest = parts[part].largest;
    if (!is_nan(all.largest.value) && !(largest.value <= all.largest.value)) all.largest = largest;
    for (int64_t i = 0; i < parts[part].num_best; ++i) all.best.add(memory.keys(part)[i]);
  }
  return all;
}

// f(line, its division) for each of R lines: lines go to threads, or few of them are divided.
template <typename F>
void for_lines(Pool& pool, int64_t R, int64_t V, F&& f) {
  if (R < pool.num_threads()) {
    for (int64_t i = 0; i < R; ++i) f(i, LineInRanges{pool, V});
    return;
  }
  pool.parallel(R, [&](int64_t i, int thread) { f(i, WholeLine{pool, thread, V}); });
}

}  // namespace quire::QUIRE_ISA
