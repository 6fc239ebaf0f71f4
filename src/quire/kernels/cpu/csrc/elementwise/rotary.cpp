// Norm and rotation of q's and k's heads, and the write of K and V.
//
// Rounds as kernels/rotary.py; see also rows.h. Legend: see abi.h.
#include "kernels_isa.h"
#include "attention/quantized/quantized_page.h"
#include "elementwise/rotate_head.h"

namespace quire::QUIRE_ISA {
namespace {

// Consecutive tokens of a prompt share the cache lines of their KV unit, so one thread takes all.
constexpr int64_t kUnitTokens = 16;
constexpr int64_t kAlignment = 64;

inline int64_t aligned(int64_t num_bytes) { return (num_bytes + kAlignment - 1) & -kAlignment; }

constexpr Rotary kNoRotary{};

template <typename T, typename Stored>
class Rotation {
 public:
  Rotation(const Op& op, const Step& step)
      : layer_(*op.layer), rotary_(op.rotary != nullptr ? *op.rotary : kNoRotary), step_(step),
        pages_(*op.layer), q_(rows_of_in<T>(op)), k_(rows_of_second<T>(op)),
        v_(rows_of_third<T>(op)), out_(rows_of_out<T>(op)), value_size_(output_dim(*op.layer)),
        q_norm_(norm(rotary_.q_norm)), k_norm_(norm(rotary_.k_norm)) {}

  int64_t scratch_bytes() const {
    return aligned(rotary_.rotary_dim * sizeof(float)) + layer_.head_dim * sizeof(T);
  }

  // scratch: scratch_bytes() bytes.
  void token(int64_t t, void* scratch) const {
    const int D = layer_.head_dim, R = rotary_.rotary_dim;
    auto* turns = static_cast<float*>(scratch);
    if (R > 0) round_turns<T>(rotary_.table + step_.positions[t] * R, R, turns);
    const float *cos = turns, *sin = turns + R / 2;
    for (int h = 0; h < layer_.num_heads; ++h)
      rotate_head(q_.at(t, h), q_norm_, cos, sin, R, D, out_.at(t, h));
    if (k_.first == nullptr) return;
    auto* head = reinterpret_cast<T*>(static_cast<char*>(scratch) + aligned(R * sizeof(float)));
    const int64_t slot = step_.groups[layer_.group].slot_mapping[t];
    for (int h = 0; h < layer_.num_kv_heads; ++h) {
      rotate_head(k_.at(t, h), k_norm_, cos, sin, R, D, head);
      store_k(pages_, slot, h, static_cast<const T*>(head));
    }
    for (int h = 0; h < layer_.num_kv_heads; ++h) store_v(pages_, slot, h, value(t, h, head));
  }

 private:
  HeadNorm<T> norm(const void* weight) const {
    return {static_cast<const T*>(weight), rotary_.norm_eps, rotary_.offsets_norm != 0,
            rotary_.norm_offset};
  }

  // v's head, followed by zeros if it is smaller than k's.
  const T* value(int64_t t, int h, T* head) const {
    const T* v = v_.at(t, h);
    if (value_size_ == layer_.head_dim) return v;
    std::memcpy(head, v, value_size_ * sizeof(T));
    std::memset(head + value_size_, 0, (layer_.head_dim - value_size_) * sizeof(T));
    return head;
  }

  const AttentionLayer& layer_;
  const Rotary& rotary_;
  const Step& step_;
  const KVPages<Stored> pages_;
  const Rows<const T> q_, k_, v_;
  const Rows<T> out_;
  const int value_size_;
  const HeadNorm<T> q_norm_, k_norm_;
};

template <typename Stored, typename T>
void rotate_and_write_kv_as(Pool& pool, const Op& op, const Step& step) {
  const Rotation<T, Stored> rotation(op, step);
  const AttentionLayer& layer = *op.layer;
  const int64_t M = step.num_tokens;
  const int64_t width = int64_t(layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim;
  int64_t chunk = min_of(kUnitTokens, M / 8 + 1);
  if (M * width <= kSerialElements / 2) chunk = M;
  for_chunks(pool, M, chunk, [&](int64_t first, int64_t end, int thread) {
    void* scratch = pool.scratch(thread, rotation.scratch_bytes());
    for (int64_t t = first; t < end; ++t) rotation.token(t, scratch);
  });
}

}  // namespace

void rotate_and_write_kv(Pool& pool, const Op& op, const Step& step) {
  const bool is_quantized = op.layer->kv_format == kInt8KV;
  if (op.layer->dtype == kBF16) {
    const auto run = is_quantized ? rotate_and_write_kv_as<uint8_t, uint16_t>
                                  : rotate_and_write_kv_as<uint16_t, uint16_t>;
    run(pool, op, step);
  } else {
    const auto run = is_quantized ? rotate_and_write_kv_as<uint8_t, float>
                                  : rotate_and_write_kv_as<float, float>;
    run(pool, op, step);
  }
}

}  // namespace quire::QUIRE_ISA
