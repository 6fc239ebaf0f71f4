// Loads a native library, asks what it is, and computes two results whose values are known.
//
//     library_probe LIBRARY
//
// scripts/release compiles it for each processor family and runs it with the library of that
// family, under an emulator if the machine is of another one.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

void* library;

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "library_probe: %s\n", what.c_str());
  std::exit(1);
}

template <typename Function>
Function find(const char* name) {
  void* found = dlsym(library, name);
  if (found == nullptr) fail(dlerror());
  return reinterpret_cast<Function>(found);
}

// XXH3 with 128 bits of the bytes i % 251 for i below 3000.
const char kDigest[] = "d324b9e72fa9fb271b846747012c24aa";

void check_hash(int32_t isa) {
  uint8_t bytes[3000], digest[16];
  for (size_t i = 0; i < sizeof bytes; ++i) bytes[i] = static_cast<uint8_t>(i % 251);
  auto hash = find<void (*)(int32_t, const void*, int64_t, void*)>("quire_xxh3_128");
  hash(isa, bytes, sizeof bytes, digest);
  std::string hex;
  for (const uint8_t byte : digest) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", byte);
    hex += two;
  }
  if (hex != kDigest) fail("the digest of known bytes is " + hex + ", not " + kDigest);
}

// Two threads find the largest of many logits.
void check_argmax(int32_t isa) {
  const int64_t rows = 3, size = 100003, largest = 77777;
  std::vector<float> logits(rows * size, -1.0f);
  for (int64_t row = 0; row < rows; ++row) logits[row * size + largest + row] = 2.5f;
  int64_t index[rows];
  float value[rows];
  void* context = find<void* (*)(int32_t, int32_t)>("quire_create")(isa, 2);
  if (context == nullptr) fail("no threads can be made");
  auto argmax = find<void (*)(void*, const float*, int64_t, int64_t, int64_t, int64_t*, float*)>(
      "quire_argmax");
  argmax(context, logits.data(), size, rows, size, index, value);
  find<void (*)(void*)>("quire_destroy")(context);
  for (int64_t row = 0; row < rows; ++row) {
    if (index[row] != largest + row || value[row] != 2.5f) fail("argmax is wrong");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) fail("give the library");
  library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) fail(dlerror());
  std::printf("sources %s", find<const char* (*)()>("quire_source_digest")());
  const int32_t num_isas = find<int32_t (*)()>("quire_num_isas")();
  for (int32_t isa = 0; isa < num_isas; ++isa) {
    const bool runs = find<int32_t (*)(int32_t)>("quire_isa_supported")(isa) != 0;
    const char* name = find<const char* (*)(int32_t)>("quire_isa_name")(isa);
    if (runs) {
      check_hash(isa);
      check_argmax(isa);
    }
    std::printf(", %s %s", name, runs ? "computes right" : "can't run here");
  }
  std::printf("\n");
}
