// The context of a caller of the library: kernels of an instruction set, and threads.
#pragma once
#include "library/kernels.h"
#include "threads/pool.h"

namespace quire {

struct Context {
  const Kernels* kernels;
  Pool pool;
};

}  // namespace quire
