// The functions that the library exports: its C ABI.
//
// Nothing is thrown across it; what callers may get wrong is checked in Python.
#include "library/api.h"

#include <new>
#include <string_view>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "library/context.h"
#include "library/kernels.h"
#include "library/read_records.h"
#include "packing/pack.h"
#include "library/program.h"
#if defined(__aarch64__)
#include "library/arm_features.h"
#endif

namespace quire {

// QUIRE_ISAS is given by the build: an ISA(name, is_optimized) for each instruction set that it
// compiles, best first.
#define ISA(name, is_optimized) extern const Kernels kernels_##name;
QUIRE_ISAS
#undef ISA

namespace {

#define ISA(name, is_optimized) &kernels_##name,
const Kernels* const kTables[] = {QUIRE_ISAS};
#undef ISA
#define ISA(name, is_optimized) is_optimized,
constexpr bool kIsOptimized[] = {QUIRE_ISAS};
#undef ISA
constexpr int kNumTables = sizeof kTables / sizeof *kTables;

#if defined(__x86_64__)
// Bit 4 of EAX in subleaf 1 of cpuid's leaf 7: g++ 12 has no name for it.
bool has_avx_vnni() {
  unsigned last_subleaf, features, ebx, ecx, edx;
  return __get_cpuid_count(7, 0, &last_subleaf, &ebx, &ecx, &edx) && last_subleaf >= 1 &&
         __get_cpuid_count(7, 1, &features, &ebx, &ecx, &edx) && (features & 1u << 4);
}

// Whether the processor has AMX's tiles and products of bytes (bits 24 and 25 of EDX of cpuid's
// leaf 7), and the system grants them to processes that ask.
bool has_amx() {
#if defined(__linux__)
  constexpr long kGetSupported = 0x1021;  // ARCH_GET_XCOMP_SUPP of arch_prctl(2)
  constexpr uint64_t kTileData = 1 << 18;
  constexpr unsigned kFeatures = 3u << 24;
  unsigned eax, ebx, ecx, edx;
  uint64_t states = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & kFeatures) == kFeatures &&
         syscall(SYS_arch_prctl, kGetSupported, &states) == 0 && (states & kTileData);
#else
  return false;
#endif
}
#endif

bool is_supported(std::string_view isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  const bool dots = avx512 && __builtin_cpu_supports("avx512vnni") &&
                    __builtin_cpu_supports("avx512bf16");
  if (isa == "avx512_bf16") return dots;
  if (isa == "avx512_amx") return dots && has_amx();
  if (isa == "avx512") return avx512;
  if (isa == "avx_vnni") return avx2 && has_avx_vnni();
  if (isa == "avx2") return avx2;
#elif defined(__aarch64__)
  if (ArmFeatures::of_this_processor().support(isa)) return true;
#endif
  return isa == "portable";
}

// Asks the system for what a set of instructions needs. Linux saves the 8 KiB of AMX's tiles only
// for processes that ask for it. Returns false if it was refused.
bool request_permission(std::string_view isa) {
#if defined(__linux__) && defined(__x86_64__)
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  if (isa == "avx512_amx") return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#endif
  (void)isa;
  return true;
}

}  // namespace
}  // namespace quire

using namespace quire;

extern "C" {

int32_t quire_abi_version() { return QUIRE_ABI_VERSION; }

const char* quire_source_digest() { return QUIRE_SOURCE_DIGEST; }

int32_t quire_num_isas() { return kNumTables; }

const char* quire_isa_name(int32_t index) { return kTables[index]->name; }

int32_t quire_isa_supported(int32_t index) { return is_supported(kTables[index]->name); }

int32_t quire_isa_optimized(int32_t index) { return kIsOptimized[index]; }

void* quire_create(int32_t isa, int32_t num_threads) {
  if (!request_permission(kTables[isa]->name)) return nullptr;
  try {
    return new Context{kTables[isa], Pool(num_threads)};
  } catch (...) {  // no memory, or no more threads: the caller gets null and says so
    return nullptr;
  }
}

void quire_destroy(void* context) { delete static_cast<Context*>(context); }

void quire_run(void* context, const Op* ops, int64_t num_ops, const Step* step) {
  auto& [kernels, pool] = *static_cast<Context*>(context);
  run_program(*kernels, pool, ops, num_ops, *step);
}

int64_t quire_packed_bytes(const Weights* linear) { return packed_bytes(*linear); }

int64_t quire_num_scales(const Weights* linear) { return num_scales(*linear); }

void quire_pack_rows(int32_t isa, const Weights* linear, const void* rows, int32_t rows_dtype,
                     int64_t ld, int64_t first, int64_t num_rows) {
  if (linear->format == kInt8)
    kTables[isa]->round_int8(*linear, rows, DType(rows_dtype), ld, first, num_rows);
  else if (linear->format == kInt4)
    kTables[isa]->round_int4(*linear, rows, DType(rows_dtype), ld, first, num_rows);
  else
    pack_rows(*linear, rows, DType(rows_dtype), ld, first, num_rows);
}

void quire_compensate_int8(int32_t isa, const Weights* linear, const void* rows, int32_t rows_dtype,
                           int64_t ld, int64_t first, int64_t num_rows, const float* feedback) {
  kTables[isa]->compensate_int8(*linear, rows, DType(rows_dtype), ld, first, num_rows, feedback);
}

void quire_clear_padding(const Weights* linear) { clear_padding(*linear); }

void quire_unpack_rows(const Weights* linear, const int64_t* outputs, int64_t num_rows, void* rows,
                       int64_t ld) {
  unpack_rows(*linear, outputs, num_rows, rows, ld);
}

void quire_linear(void* context, const Weights* linear, int32_t dtype, const void* x, int64_t ldx,
                  int64_t M, void* out, int32_t out_dtype, int64_t ldo, int32_t epilogue,
                  const AdapterLinear* adapter) {
  auto& [kernels, pool] = *static_cast<Context*>(context);
  kernels->linear(pool, *linear, DType(dtype), x, ldx, M, out, DType(out_dtype), ldo,
                  Epilogue(epilogue), adapter);
}

void quire_attention(void* context, const AttentionLayer* layer, const Step* step, const void* q,
                     int64_t ldq, void* out, int64_t ldo, float* lse) {
  auto& [kernels, pool] = *static_cast<Context*>(context);
  kernels->attention(pool, *layer, *step, q, ldq, out, ldo, lse);
}

void quire_write_kv(void* context, const AttentionLayer* layer, const Step* step, const void* k,
                    const void* v, int64_t ld) {
  auto& [kernels, pool] = *static_cast<Context*>(context);
  kernels->write_kv(pool, *layer, *step, k, v, ld);
}

void quire_argmax(void* context, const float* logits, int64_t ld, int64_t R, int64_t V,
                  int64_t* index, float* largest) {
  auto& [kernels, pool] = *static_cast<Context*>(context);
  kernels->argmax(pool, logits, ld, R, V, index, largest);
}

void quire_sample(void* context, const float* logits, int64_t ld, int64_t V, const SampleRow* rows,
                  int64_t R, int64_t* token_ids, float* largest) {
  auto& [kernels, pool] = *static_cast<Context*>(context);
  kernels->sample(pool, logits, ld, V, rows, R, token_ids, largest);
}

void quire_sample_allowed(void* context, float* logits, int64_t ld, int64_t V,
                          const SampleRow* rows, const int64_t* masks, const uint32_t* words,
                          int64_t width, int64_t R, int64_t* token_ids, float* largest,
                          float* raw_largest) {
  auto& [kernels, pool] = *static_cast<Context*>(context);
  kernels->sample_allowed(pool, logits, ld, V, rows, masks, words, width, R, token_ids, largest,
                          raw_largest);
}

void quire_forbid(void* context, float* logits, int64_t ld, int64_t V, const int64_t* lines,
                  const uint32_t* words, int64_t width, int64_t N) {
  auto& [kernels, pool] = *static_cast<Context*>(context);
  kernels->forbid(pool, logits, ld, V, lines, words, width, N);
}

void quire_token_logprobs(void* context, const float* logits, int64_t ld, int64_t V,
                          const LogprobRow* rows, int64_t R, int64_t width, float* logprobs,
                          int64_t* tokens) {
  auto& [kernels, pool] = *static_cast<Context*>(context);
  kernels->token_logprobs(pool, logits, ld, V, rows, R, width, logprobs, tokens);
}

void quire_gated_delta(void* context, const StateLayer* layer, const StateStep* step,
                       const GatedDelta* call) {
  auto& [kernels, pool] = *static_cast<Context*>(context);
  kernels->gated_delta(pool, *layer, *step, *call);
}

void quire_mamba2(void* context, const StateLayer* layer, const StateStep* step, const Mamba2* call) {
  auto& [kernels, pool] = *static_cast<Context*>(context);
  kernels->mamba2(pool, *layer, *step, *call);
}

void quire_short_conv(void* context, const StateLayer* layer, const StateStep* step,
                      const ShortConv* call) {
  auto& [kernels, pool] = *static_cast<Context*>(context);
  kernels->short_conv(pool, *layer, *step, *call);
}

void quire_xxh3_128(int32_t isa, const void* input, int64_t num_bytes, void* digest) {
  kTables[isa]->xxh3_128(static_cast<const uint8_t*>(input), num_bytes,
                         static_cast<uint8_t*>(digest));
}

int32_t quire_read_records(int32_t isa, int32_t descriptor, int64_t num_records,
                           const int64_t* places, const void* digests, void* are_sound) {
  return read_records(*kTables[isa], descriptor, num_records, places,
                      static_cast<const uint8_t*>(digests), static_cast<uint8_t*>(are_sound));
}

}  // extern "C"
