// Multiplies rows by weights with quire's kernels, between marks.
//
//     quire_linears LIBRARY INSTRUCTION_SET FORMAT ROWS:OUTPUTS:INPUTS...
//
// Prints the bytes of each product's weights. They are no numbers of a model: what is executed
// does not depend on them. Linked with nothing of quire; its structures are those of the C ABI.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "library/abi.h"
#include "mark.h"

namespace {

using namespace quire;

void* library;

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "quire_linears: %s\n", what.c_str());
  std::exit(1);
}

template <typename Function>
Function find(const char* name) {
  void* found = dlsym(library, name);
  if (found == nullptr) fail(dlerror());
  return reinterpret_cast<Function>(found);
}

int32_t find_isa(const std::string& name) {
  const int32_t count = find<int32_t (*)()>("quire_num_isas")();
  for (int32_t isa = 0; isa < count; ++isa)
    if (find<const char* (*)(int32_t)>("quire_isa_name")(isa) == name) {
      if (find<int32_t (*)(int32_t)>("quire_isa_supported")(isa)) return isa;
      fail("this processor lacks " + name);
    }
  fail("the library lacks " + name);
}

// The formats as quire loads them: those of GGUF files, and its own.
struct Form {
  const char* name;
  WeightLayout layout;
  int32_t group_size;
  CodeFormat code_format;
};

const Form kForms[] = {
    {"Q8_0", kBlockQuantized, 32, {8, 128, 0, 0, 0, 0, kBF16, 0, nullptr, nullptr}},
    {"Q4_K", kBlockQuantized, 32, {4, 0, 256, 0, 0, 1, kBF16, 0, nullptr, nullptr}},
    {"Q6_K", kBlockQuantized, 16, {6, 32, 256, 0, 0, 0, kBF16, 0, nullptr, nullptr}},
    {"int8", kInt8, 256, {}},
    {"int4", kInt4, 32, {}},
    {"bf16", kDenseBF16, 0, {}},
};

const Form& find_form(const std::string& name) {
  for (const Form& form : kForms)
    if (form.name == name) return form;
  fail("there is no format " + name);
}

// Memory on a boundary of 64 bytes, as quire allocates it; a line longer than is asked for, since
// kernels fetch ahead. Each pair of bytes is a small number in bf16 and in fp16.
template <typename T>
T* allocate(size_t bytes) {
  const size_t rounded = (bytes + 127) / 64 * 64;
  void* memory = std::aligned_alloc(64, rounded);
  if (memory == nullptr) fail("no memory");
  return static_cast<T*>(std::memset(memory, 0x3c, rounded));
}

void multiply(void* context, const Form& form, int64_t M, int32_t N, int32_t K) {
  Weights weights{};
  weights.format = form.layout;
  weights.num_outputs = N;
  weights.num_inputs = K;
  weights.group_size = form.group_size;
  weights.code_format = &form.code_format;
  const int64_t bytes = find<int64_t (*)(const Weights*)>("quire_packed_bytes")(&weights);
  const int64_t num_scales = find<int64_t (*)(const Weights*)>("quire_num_scales")(&weights);
  weights.weights = allocate<uint8_t>(size_t(bytes));
  weights.scales = allocate<float>(size_t(num_scales) * sizeof(float));
  const auto* x = allocate<uint16_t>(size_t(M * K) * sizeof(uint16_t));
  auto* out = allocate<uint16_t>(size_t(M * N) * sizeof(uint16_t));
  const auto linear =
      find<void (*)(void*, const Weights*, int32_t, const void*, int64_t, int64_t, void*, int32_t,
                    int64_t, int32_t, const void*)>("quire_linear");
  for (int i = 0; i < 2; ++i) {  // the first one allocates memory
    mark_begin();
    linear(context, &weights, kBF16, x, K, M, out, kBF16, N, kStore, nullptr);
    mark_end();
  }
  std::printf("%lld\n", static_cast<long long>(bytes));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) fail("give the library, the instruction set, the format, and shapes");
  library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) fail(dlerror());
  void* context = find<void* (*)(int32_t, int32_t)>("quire_create")(find_isa(argv[2]), 1);
  if (context == nullptr) fail("no context can be made");
  const Form& form = find_form(argv[3]);
  for (int i = 4; i < argc; ++i) {
    long M, N, K;
    if (std::sscanf(argv[i], "%ld:%ld:%ld", &M, &N, &K) != 3) fail("a shape is M:N:K");
    multiply(context, form, M, int32_t(N), int32_t(K));
  }
}
