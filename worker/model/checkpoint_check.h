#pragma once

#include "absl/status/status.h"
#include "worker/model/model_config.h"
#include "worker/model/safetensors.h"

namespace weft {

// Whether `checkpoint` has every tensor that a model of this `config` needs, with its shape and a
// weight's dtype, and in those layers no weight or bias that it would leave out (a checkpoint of
// another family); other tensors are ignored. Reads no weights, so that start-up fails at once and
// not after minutes of packing. NOT_FOUND or INVALID_ARGUMENT as Checkpoint::Find(), naming the
// keys of config.json that ask for the tensor or its shape.
absl::Status CheckTensors(const ModelConfig& config, const Checkpoint& checkpoint);

}  // namespace weft
