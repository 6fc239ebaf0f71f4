// Inner columns and deltas of adapters.
//
// An item of the inner columns' work is one or two units of sixteen columns times up to four rows
// of one adapter. An element has two sums, of every second step over K, so that few rows keep the
// processor busy, too; they are added at last. A panel's deltas are computed adapter after adapter:
// its rows share what is read of B.
//
// Compiled once per instruction set.
#include "adapters/adapters.h"

#include "linear/linear_tile.h"
#include "simd.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int kMaxRows = 4;      // of an item
constexpr int kChains = 2;       // sums of an element
constexpr int kMaxParts = 8;     // of a linear
// Rows whose deltas of a panel are in registers, a sum each.
constexpr int kDeltaRows = kPartLanes == 16 ? 8 : 4;
constexpr int64_t kFetchedBytes = 1024;  // of a unit; what follows, the processor sees coming
constexpr int64_t kAheadBytes = 2048;    // of A
constexpr int64_t kUnitStepBytes = kUnitOutputs * 4;  // two numbers an output in bf16, one in fp32
constexpr int kNumSlices = int(kUnitOutputs) / kPartLanes;

inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

// The first of ascending rows that is not below `row`.
inline const int32_t* first_from(const int32_t* rows, const int32_t* end, int64_t row) {
  while (rows < end) {
    const int32_t* middle = rows + (end - rows) / 2;
    if (*middle < row)
      rows = middle + 1;
    else
      end = middle;
  }
  return rows;
}

// One step of some lanes, of A or of B: sums + the products of kInputs inputs.
template <typename T>
struct Step;

template <>
struct Step<float> {
  static constexpr int kInputs = 1;
  static part add(part sums, const uint8_t* weights, const float* x) {
    return fma(load_as<part>(weights), splat_part(*x), sums);
  }
};

template <>
struct Step<uint16_t> {
  static constexpr int kInputs = 2;
#if defined(__AVX512BF16__)
  static part add(part sums, const uint8_t* weights, const uint16_t* x) {
    const auto pair = (__m512bh)_mm512_set1_epi32(load_as<int32_t>(x));
    return (part)_mm512_dpbf16_ps((__m512)sums, load_as<__m512bh>(weights), pair);
  }
#else
  static part add(part sums, const uint8_t* weights, const uint16_t* x) {
    typedef uint32_t Bits __attribute__((vector_size(kRegisterBytes)));
    const auto pairs = load_as<Bits>(weights);
    const auto even = (part)(pairs << 16), odd = (part)(pairs & 0xffff0000u);
    return fma(odd, splat_part(to_float(x[1])), fma(even, splat_part(to_float(x[0])), sums));
  }
#endif
};

template <typename T>
struct InnerItem {
  const uint8_t* a;  // of the first unit
  int64_t unit_bytes;
  const float* scales;
  const T* rows[kMaxRows];
  T* out[kMaxRows];
  int64_t num_inputs;
};

// R rows times U units.
template <typename T, int R, int U>
void compute_item(const InnerItem<T>& item) {
  constexpr int kInputs = Step<T>::kInputs;
  const int64_t num_steps = item.num_inputs / kInputs, whole = num_steps / kChains * kChains;
  for (int slice = 0; slice < kNumSlices; ++slice) {
    const uint8_t* a = item.a + slice * kRegisterBytes;
    part sums[kChains][U][R] = {};
    const auto add = [&](int chain, int64_t step, const T* const* x, int64_t input) {
#pragma GCC unroll 2
      for (int u = 0; u < U; ++u)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
          sums[chain][u][r] = Step<T>::add(
              sums[chain][u][r], a + u * item.unit_bytes + step * kUnitStepBytes, x[r] + input);
    };
    for (int64_t step = 0; step < whole; step += kChains)
#pragma GCC unroll 2
      for (int chain = 0; chain < kChains; ++chain) {
        for (int u = 0; u < U; ++u)
          __builtin_prefetch(
              a + u * item.unit_bytes + (step + chain) * kUnitStepBytes + kAheadBytes, 0, 2);
        add(chain, step + chain, item.rows, (step + chain) * kInputs);
      }
    if (whole < num_steps) add(0, whole, item.rows, whole * kInputs);
    if (num_steps * kInputs < item.num_inputs) {  // one is left of a pair
      T lasts[R][2] = {};
      const T* x[R];
      for (int r = 0; r < R; ++r) {
        lasts[r][0] = item.rows[r][item.num_inputs - 1];
        x[r] = lasts[r];
      }
      add(1, num_steps, x, 0);
    }
    for (int u = 0; u < U; ++u) {
      const int64_t column = u * kUnitOutputs + slice * kPartLanes;
      const auto scales = load_as<part>(item.scales + column);
      for (int r = 0; r < R; ++r)
        store(item.out[r] + column, (sums[0][u][r] + sums[1][u][r]) * scales);
    }
  }
}

template <typename T, int U>
void compute_item(const InnerItem<T>& item, int num_rows) {
  switch (num_rows) {
    case 1:
      return compute_item<T, 1, U>(item);
    case 2:
      return compute_item<T, 2, U>(item);
    case 3:
      return compute_item<T, 3, U>(item);
    default:
      return compute_item<T, 4, U>(item);
  }
}

int64_t num_units(const AdapterSlot& slot) { return divide_up(slot.num_columns, kUnitOutputs); }

int64_t num_unit_pairs(const AdapterSlot& slot) { return divide_up(num_units(slot), 2); }

// All items of a step, in the order of the groups.
class InnerItems {
 public:
  InnerItems(const AdapterLinear& adapter) : adapter_(adapter) {}

  int64_t count() const {
    int64_t found = 0;
    for (int32_t g = 0; g < adapter_.rows->num_groups; ++g) found += size(group(g));
    return found;
  }

  // f(group, pair of units, first row, rows) of one of them; rows count from the group's first.
  template <typename F>
  void at(int64_t item, F&& f) const {
    for (int32_t g = 0; g < adapter_.rows->num_groups; ++g) {
      const int64_t here = size(group(g));
      if (item < here) {
        const int64_t blocks = divide_up(group(g).count, kMaxRows);
        const int64_t first = item % blocks * kMaxRows;
        f(group(g), item / blocks, first, int(min_of(kMaxRows, group(g).count - first)));
        return;
      }
      item -= here;
    }
  }

 private:
  const AdapterGroup& group(int32_t g) const { return adapter_.rows->groups[g]; }
  int64_t size(const AdapterGroup& group) const {
    return num_unit_pairs(adapter_.slots[group.slot]) * divide_up(group.count, kMaxRows);
  }

  const AdapterLinear& adapter_;
};

template <typename T>
void compute_all(Pool& pool, const AdapterCall& call, const T* x, int64_t ldx, T* inner) {
  const AdapterLinear& adapter = *call.adapter;
  const InnerItems items(adapter);
  const int64_t K = call.linear->num_inputs;
  const int64_t unit_bytes = divide_up(K, Step<T>::kInputs) * kUnitStepBytes;
  share(pool, 6, items.count(), [&](int64_t index, int) {
    items.at(index, [&](const AdapterGroup& group, int64_t pair, int64_t first, int count) {
      const AdapterSlot& slot = call.slot(group.slot);
      const int64_t unit = 2 * pair;
      InnerItem<T> item;
      item.unit_bytes = unit_bytes;
      item.a = static_cast<const uint8_t*>(slot.a) + unit * unit_bytes;
      item.scales = slot.scales + unit * kUnitOutputs;
      item.num_inputs = K;
      for (int r = 0; r < count; ++r) {
        const int64_t place = group.first + first + r;
        item.rows[r] = x + adapter.rows->order[place] * ldx;
        item.out[r] = inner + place * call.ld + unit * kUnitOutputs;
      }
      if (unit + 1 < num_units(slot))
        compute_item<T, 2>(item, count);
      else
        compute_item<T, 1>(item, count);
    });
  });
}

// What a part of the linear adds to one unit: columns [column, column + rank) of h times b.
struct UnitPart {
  const uint8_t* b;   // [num_steps][16][kInputs]
  int64_t num_steps;  // over the rank
  int64_t column;
};

// All parts that have outputs in a unit.
struct Unit {
  int count = 0;
  UnitPart parts[kMaxParts];
};

// deltas of R rows and one unit: out [R], of 16 each.
template <typename T, int R>
void unit_deltas(const Unit& unit, const T* const* inner, float* const* out) {
  for (int slice = 0; slice < kNumSlices; ++slice) {
    part sums[R] = {};
    for (int p = 0; p < unit.count; ++p) {
      const auto [b, num_steps, column] = unit.parts[p];
      for (int64_t j = 0; j < num_steps; ++j) {
        const uint8_t* const weights = b + j * kUnitStepBytes + slice * kRegisterBytes;
        const int64_t input = column + j * Step<T>::kInputs;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sums[r] = Step<T>::add(sums[r], weights, inner[r] + input);
      }
    }
    for (int r = 0; r < R; ++r) store(out[r] + slice * kPartLanes, sums[r]);
  }
}

// The same of two units of equal rank, each with one part, side by side: most panels.
template <typename T, int R>
void pair_deltas(const UnitPart& low, const UnitPart& high, const T* const* inner,
                 float* const* out) {
  const T *lows[R], *highs[R];
  for (int r = 0; r < R; ++r) {
    lows[r] = inner[r] + low.column;
    highs[r] = inner[r] + high.column;
  }
  for (int slice = 0; slice < kNumSlices; ++slice) {
    part sums[2][R] = {};
    for (int64_t j = 0; j < low.num_steps; ++j) {
      const int64_t at = j * kUnitStepBytes + slice * kRegisterBytes;
      const int64_t input = j * Step<T>::kInputs;
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        sums[0][r] = Step<T>::add(sums[0][r], low.b + at, lows[r] + input);
        sums[1][r] = Step<T>::add(sums[1][r], high.b + at, highs[r] + input);
      }
    }
    for (int r = 0; r < R; ++r) {
      float* const to = out[r] + slice * kPartLanes;
      store(to, sums[0][r]);
      store(to + kUnitOutputs, sums[1][r]);
    }
  }
}

template <typename T, int R>
void rows_deltas(const Unit (&units)[2], const T* const* inner, float* const* out) {
  const UnitPart &low = units[0].parts[0], &high = units[1].parts[0];
  if (units[0].count == 1 && units[1].count == 1 && low.num_steps == high.num_steps)
    return pair_deltas<T, R>(low, high, inner, out);
  float* highs[R];
  for (int r = 0; r < R; ++r) highs[r] = out[r] + kUnitOutputs;
  unit_deltas<T, R>(units[0], inner, out);
  unit_deltas<T, R>(units[1], inner, highs);
}

template <typename T>
Unit find_unit(const AdapterCall& call, const AdapterSlot& slot, int64_t panel, int half) {
  const AdapterLinear& adapter = *call.adapter;
  Unit found;
  const auto add = [&](int32_t p, int64_t index) {
    const AdapterPart& part = slot.parts[p];
    const int64_t num_steps = divide_up(part.rank, Step<T>::kInputs);
    if (num_steps > 0)
      found.parts[found.count++] = {
          static_cast<const uint8_t*>(part.b) + index * num_steps * kUnitStepBytes, num_steps,
          part.column};
  };
  if (call.linear->interleave > 0) {
    add(half, panel);
    return found;
  }
  const int64_t first = panel * kPanelOutputs + half * kUnitOutputs, end = first + kUnitOutputs;
  for (int32_t p = 0; p < adapter.num_parts; ++p)
    if (adapter.starts[p] < end && adapter.starts[p + 1] > first)
      add(p, first / kUnitOutputs - adapter.starts[p] / kUnitOutputs);
  return found;
}

// g++ takes a function that only prefetches for one without effects, and leaves its calls out, unless
// it has this.
inline void keep_calls() { asm volatile(""); }

void prefetch(const Unit& unit) {
  for (int p = 0; p < unit.count; ++p) {
    const int64_t size = min_of(unit.parts[p].num_steps * kUnitStepBytes, kFetchedBytes);
    for (int64_t at = 0; at < size; at += kLineBytes)
      __builtin_prefetch(unit.parts[p].b + at, 0, 2);
  }
}

template <typename T>
void add_group(const AdapterCall& call, const AdapterGroup& group, Range rows, int64_t panel,
               float* deltas) {
  const AdapterSlot& slot = call.slot(group.slot);
  if (slot.num_columns == 0) return;
  const int32_t* const order = call.adapter->rows->order;
  const int32_t* first = order + group.first;
  const int32_t* end = first + group.count;
  if (rows.size() < call.adapter->rows->num_tokens) {
    first = first_from(first, end, rows.first);
    end = first_from(first, end, rows.end);
  }
  if (first == end) return;
  const Unit units[2] = {find_unit<T>(call, slot, panel, 0), find_unit<T>(call, slot, panel, 1)};
  while (first < end) {
    const T* inner[kDeltaRows];
    float* out[kDeltaRows];
    const int count = int(min_of(kDeltaRows, end - first));
    for (int r = 0; r < count; ++r) {
      inner[r] = static_cast<const T*>(call.inner) + (first - order + r) * call.ld;
      out[r] = deltas + (first[r] - rows.first) * kPanelOutputs;
    }
    first += count;
    int done = 0;
    const auto compute = [&]<int R>() {
      for (; count - done >= R; done += R) rows_deltas<T, R>(units, inner + done, out + done);
    };
    compute.template operator()<kDeltaRows>();
    compute.template operator()<kDeltaRows / 2>();
    compute.template operator()<2>();
    compute.template operator()<1>();
  }
}

// What the thread reads for its next panel comes while it multiplies this one.
template <typename T>
void prefetch_panel(const AdapterCall& call, int64_t panel) {
  keep_calls();
  if (panel >= num_panels(*call.linear)) return;
  const AdapterRows& step = *call.adapter->rows;
  for (int32_t g = 0; g < step.num_groups; ++g) {
    const AdapterSlot& slot = call.slot(step.groups[g].slot);
    if (slot.num_columns == 0) continue;
    prefetch(find_unit<T>(call, slot, panel, 0));
    prefetch(find_unit<T>(call, slot, panel, 1));
  }
}

template <typename T>
void add_groups(const AdapterCall& call, Range rows, int64_t panel, float* deltas) {
  const AdapterRows& step = *call.adapter->rows;
  for (int32_t g = 0; g < step.num_groups; ++g)
    add_group<T>(call, step.groups[g], rows, panel, deltas);
  prefetch_panel<T>(call, panel + 1);
}

// A of the linear that follows comes while this one is multiplied: its share of one panel.
void prefetch_following(const AdapterCall& call, int64_t panel) {
  keep_calls();
  const AdapterLinear* const next = call.adapter->next;
  if (next == nullptr) return;
  const int64_t num_steps = divide_up(next->num_inputs, call.dtype == kBF16 ? 2 : 1);
  const AdapterRows& step = *call.adapter->rows;
  for (int32_t g = 0; g < step.num_groups; ++g) {
    const AdapterSlot& slot = next->slots[step.groups[g].slot];
    const Range all{0, num_units(slot) * num_steps * kUnitStepBytes / kLineBytes};
    const Range lines = all.part(panel, num_panels(*call.linear));
    const auto* const a = static_cast<const uint8_t*>(slot.a);
    for (int64_t line = lines.first; line < lines.end; ++line)
      __builtin_prefetch(a + line * kLineBytes, 0, 2);
  }
}

}  // namespace

AdapterCall compute_inner(Pool& pool, const AdapterLinear& adapter, const Weights& linear,
                          DType dtype, const void* x, int64_t ldx, int64_t M) {
  AdapterCall call{&adapter, &linear, dtype, nullptr, 0, nullptr, 0};
  const AdapterRows& rows = *adapter.rows;
  if (rows.num_tokens != M) return call;
  bool is_used = false;
  for (int32_t g = 0; g < rows.num_groups; ++g)
    is_used |= call.slot(rows.groups[g].slot).num_columns > 0;
  if (!is_used) return call;
  call.ld = adapter.max_columns;
  void* const inner = pool.shared(4, rows.num_rows * call.ld * (dtype == kBF16 ? 2 : 4));
  if (dtype == kBF16)
    compute_all(pool, call, static_cast<const uint16_t*>(x), ldx, static_cast<uint16_t*>(inner));
  else
    compute_all(pool, call, static_cast<const float*>(x), ldx, static_cast<float*>(inner));
  call.inner = inner;
  // An input takes a byte or more of what is multiplied; see num_row_groups.
  call.most_rows = min_of(M, kMaxGroupBytes / linear.num_inputs + 1);
  call.deltas = static_cast<float*>(pool.shared(
      5, pool.num_threads() * call.most_rows * kPanelOutputs * int64_t(sizeof(float))));
  return call;
}

const float* panel_deltas(const AdapterCall& call, Range rows, int64_t panel, int thread) {
  if (rows.first == 0) prefetch_following(call, panel);
  if (call.inner == nullptr) return nullptr;
  float* deltas = call.deltas + thread * call.most_rows * kPanelOutputs;
  if (call.dtype == kBF16)
    add_groups<uint16_t>(call, rows, panel, deltas);
  else
    add_groups<float>(call, rows, panel, deltas);
  return deltas;
}

}  // namespace quire::QUIRE_ISA
