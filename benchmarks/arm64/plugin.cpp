// A plugin of qemu-user that counts the ARM64 instructions between two marks of a program.
//
// Each mark prints a line to stderr: the number of its operand, then the instructions since the
// last mark, of which SIMD and floating-point, and loads and stores. qemu's own header is not
// installed with it, so the functions that are used are declared here (qemu-plugin.h, version 1).
#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "mark.h"

extern "C" {
struct qemu_plugin_tb;
struct qemu_plugin_insn;
typedef void (*TranslatedCallback)(uint64_t id, qemu_plugin_tb*);
typedef void (*ExecutedCallback)(unsigned vcpu, void* data);
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id, TranslatedCallback);
void qemu_plugin_register_vcpu_tb_exec_inline(qemu_plugin_tb*, int op, void* to, uint64_t added);
void qemu_plugin_register_vcpu_insn_exec_cb(qemu_plugin_insn*, ExecutedCallback, int flags,
                                            void* data);
size_t qemu_plugin_tb_n_insns(const qemu_plugin_tb*);
qemu_plugin_insn* qemu_plugin_tb_get_insn(const qemu_plugin_tb*, size_t index);
const void* qemu_plugin_insn_data(const qemu_plugin_insn*);
__attribute__((visibility("default"))) int qemu_plugin_version = 1;
}

namespace {

constexpr int kAddU64 = 0, kReadsNoRegisters = 0;
enum Class { kAll, kSimd, kMemory, kNumClasses };

// Of all threads: programs that are counted have one.
uint64_t counts[kNumClasses];
uint64_t at_last_mark[kNumClasses];

void print_counts(unsigned, void* operand) {
  std::fprintf(stderr, "mark %zu", reinterpret_cast<size_t>(operand));
  for (int i = 0; i < kNumClasses; ++i)
    std::fprintf(stderr, " %" PRIu64, counts[i] - at_last_mark[i]);
  std::fprintf(stderr, "\n");
  std::memcpy(at_last_mark, counts, sizeof counts);
}

// Bits 25 to 28 tell the class (Arm Architecture Reference Manual, C4.1).
bool is_simd(uint32_t code) { return (code >> 25 & 7) == 7; }
bool is_memory(uint32_t code) { return (code >> 25 & 5) == 4; }

void count_block(uint64_t, qemu_plugin_tb* block) {
  uint64_t added[kNumClasses] = {};
  for (size_t i = 0; i < qemu_plugin_tb_n_insns(block); ++i) {
    qemu_plugin_insn* const instruction = qemu_plugin_tb_get_insn(block, i);
    uint32_t code;
    std::memcpy(&code, qemu_plugin_insn_data(instruction), sizeof code);
    ++added[kAll];
    added[kSimd] += is_simd(code);
    added[kMemory] += is_memory(code);
    for (uint32_t operand : {kBegin, kEnd})
      if (code == hint_code(operand))
        qemu_plugin_register_vcpu_insn_exec_cb(instruction, print_counts, kReadsNoRegisters,
                                               reinterpret_cast<void*>(size_t(operand)));
  }
  for (int i = 0; i < kNumClasses; ++i)
    qemu_plugin_register_vcpu_tb_exec_inline(block, kAddU64, &counts[i], added[i]);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int qemu_plugin_install(uint64_t id, const void*,
                                                                         int, char**) {
  qemu_plugin_register_vcpu_tb_trans_cb(id, count_block);
  return 0;
}
