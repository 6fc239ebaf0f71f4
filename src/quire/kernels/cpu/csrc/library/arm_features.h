// Whether an ARM64 processor has the features that some instruction sets of build.py need.
#pragma once
#include <string_view>
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace quire {

// Bits of Linux's <asm/hwcap.h>. Old headers lack the last two.
static constexpr unsigned long kHwcapAtomics = 1ul << 8, kHwcapDotProd = 1ul << 20;
static constexpr unsigned long kHwcap2I8mm = 1ul << 13, kHwcap2Bf16 = 1ul << 14;

struct ArmFeatures {
  // dotprod is true only if the processor also has ARMv8.1's atomics, which the same flags allow.
  bool dotprod = false, i8mm = false, bf16 = false;

  // Finds no features on systems other than Linux and macOS.
  static ArmFeatures of_this_processor() {
    ArmFeatures found;
#if defined(__linux__)
    const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
    found.dotprod = (first & kHwcapDotProd) != 0 && (first & kHwcapAtomics) != 0;
    found.i8mm = (second & kHwcap2I8mm) != 0;
    found.bf16 = (second & kHwcap2Bf16) != 0;
#elif defined(__APPLE__)
    const auto has = [](const char* name) {
      int value = 0;
      size_t size = sizeof value;
      return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
    };
    found.dotprod = has("hw.optional.arm.FEAT_DotProd") && has("hw.optional.arm.FEAT_LSE");
    found.i8mm = has("hw.optional.arm.FEAT_I8MM");
    found.bf16 = has("hw.optional.arm.FEAT_BF16");
#endif
    return found;
  }

  bool support(std::string_view isa) const {
    if (isa == "neon") return true;
    if (isa == "neon_dotprod") return dotprod;
    if (isa == "neon_i8mm") return dotprod && i8mm;
    return isa == "neon_bf16" && dotprod && i8mm && bf16;
  }
};

}  // namespace quire
