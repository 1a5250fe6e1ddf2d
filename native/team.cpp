// Pins the threads of the OpenMP team.
#if defined(__linux__)
#include <sched.h>
#endif

#include <cstdint>

#include "parallel.h"

// Pins thread i of the team to cores[i], or lets each thread run on any of them. Cores that are not allowed are
// ignored, and macOS lets nobody choose.
LORIKEET_EXPORT void lorikeet_place(const int64_t* cores, int64_t threads, int64_t apart) {
#if defined(__linux__)
  lorikeet::parallel(threads, [=](int64_t thread, int64_t) {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    for (int64_t i = 0; i < threads; ++i)
      if (!apart || i == thread) CPU_SET(cores[i], &mask);
    sched_setaffinity(0, sizeof mask, &mask);
  });
#endif
}
