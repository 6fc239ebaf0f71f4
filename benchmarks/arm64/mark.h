// How a program tells the plugin where it begins and ends to count.
//
// A mark is a hint that no processor knows, which it executes as a nop.
#pragma once
#include <cstdint>

constexpr uint32_t kBegin = 126, kEnd = 127;

// The code of `hint #operand`.
constexpr uint32_t hint_code(uint32_t operand) { return 0xd503201f | operand << 5; }

#if defined(__aarch64__)
inline void mark_begin() { asm volatile("hint #126" ::: "memory"); }
inline void mark_end() { asm volatile("hint #127" ::: "memory"); }
#endif
