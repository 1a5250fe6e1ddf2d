// Whether this machine can run this library, and whether Python has the same records.
#if defined(__AMX_BF16__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#if defined(__APPLE__)
#include <sys/sysctl.h>
#else
#include <sys/auxv.h>
#endif
#endif

#include <cstdint>
#include <cstring>

#include "parallel.h"
#include "records.h"

#if defined(__AMX_BF16__)
namespace {

// Whether there is a tile unit for bfloat16 and bytes that this process may use. Linux requires a request, as every thread's
// state grows by the tiles (https://docs.kernel.org/arch/x86/xstate.html).
bool may_use_tiles() {
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  const bool tiles = edx >> 24 & 1, pairs = edx >> 22 & 1, bytes = edx >> 25 & 1;
  return tiles && pairs && bytes && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

}  // namespace
#endif

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
namespace {

bool has_bfloat16() {
#if defined(__APPLE__)
  int64_t found = 0;
  size_t bytes = sizeof found;
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &found, &bytes, nullptr, 0) == 0 && found;
#else
  constexpr unsigned long kBfloat16 = 1 << 14;  // HWCAP2_BF16, which older headers lack
  return getauxval(AT_HWCAP2) & kBfloat16;
#endif
}

}  // namespace
#endif

#if defined(__aarch64__)
LORIKEET_EXPORT int64_t lorikeet_supported() {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return has_bfloat16();
#else
  return true;
#endif
}
#else
LORIKEET_EXPORT int64_t lorikeet_supported() {
  __builtin_cpu_init();
#if defined(__AMX_BF16__)
  if (!may_use_tiles() || !__builtin_cpu_supports("avx512vbmi")) return false;
#endif
#if defined(__AVX512BF16__)
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#elif defined(__AVX512F__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
}
#endif

// The size of a record of records.h in bytes; 0 for an unknown name.
LORIKEET_EXPORT int64_t lorikeet_record_bytes(const char* name) {
  using namespace lorikeet;
  const struct {
    const char* name;
    int64_t bytes;
  } records[] = {
      {"Weight", sizeof(Weight)},         {"Adapters", sizeof(Adapters)}, {"Extras", sizeof(Extras)},
      {"Layer", sizeof(Layer)},           {"Model", sizeof(Model)},       {"ProductTargets", sizeof(ProductTargets)},
      {"LayersStep", sizeof(LayersStep)}, {"Group", sizeof(Group)},       {"Recurrences", sizeof(Recurrences)},
  };
  for (const auto& record : records)
    if (!std::strcmp(record.name, name)) return record.bytes;
  return 0;
}
