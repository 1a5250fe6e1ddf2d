// The changes of adapters besides LoRA: factors and summands of outputs, and the weights of norms. Python fills the
// records in; see records.h.
#pragma once

#include <cstdint>

namespace lorikeet {

// One module of a fused product; `module` is its index in a layer.
struct Target {
  int64_t module, column, outputs;
};
struct Targets {
  int64_t count;
  Target each[1];  // and more
};

// Of one module on one layer; null where there is none.
struct Affine {
  const void *scale, *shift;
};

// The rows [start, stop) of an adapter. `norms` is null, or has those before attention and before the MLP of each layer.
struct Adjusted {
  int64_t start, stop;
  const Affine* affines;
  const void* const* norms;
};

struct Adjusts {
  const Adjusted* segments;
  int64_t count;
};

}  // namespace lorikeet
