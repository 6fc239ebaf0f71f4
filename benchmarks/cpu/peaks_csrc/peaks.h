// Counts products that are made in registers alone, by the instructions of an instruction set.
//
// peaks.py compiles the files of this folder. A function makes a number of steps, and returns the
// number of products that they have made. Weights stay in registers, and x is read from the L1 cache
// once a step.
#pragma once
#include <cstdint>
#include <cstring>

// Numbers that are normal as fp32 and as bf16: arithmetic with others may be slow.
alignas(64) static const struct Bytes {
  uint8_t bytes[256];
  Bytes() { std::memset(bytes, 0x3f, sizeof bytes); }
} kNumbers;

// The compiler knows no more what p points to, so it has to be read.
template <typename T>
inline const T* read_again(const T* p) {
  asm volatile("" : "+r"(p));
  return p;
}

// The compiler has to compute the sum.
template <typename V>
inline void keep(V& sum) {
#if defined(__aarch64__)
  asm volatile("" : "+w"(sum));
#elif defined(__AVX512F__)
  asm volatile("" : "+v"(sum));
#else
  asm volatile("" : "+x"(sum));
#endif
}
