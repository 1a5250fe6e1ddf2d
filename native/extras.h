// The extras of adapters, which are their changes besides LoRA: factors and summands of outputs, and the weights of
// norms. Python fills the records in; see records.h.
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

// The factors and summands of one module on one layer. A missing one is null.
struct Affine {
  const void *scale, *shift;
};

// The rows [start, stop) of an adapter. `norms` is null, or has the norms before attention and before the MLP of each
// layer.
struct ExtrasSegment {
  int64_t start, stop;
  const Affine* affines;
  const void* const* norms;
};

struct Extras {
  const ExtrasSegment* segments;
  int64_t count;
};

}  // namespace lorikeet
