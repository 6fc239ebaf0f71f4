// Headers of the standard library and the compiler that most kernels include.
//
// build.py precompiles this file for each instruction set where it compiles many files, and includes
// it before each of them. Objects are the same without it, so every file includes what it uses.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
