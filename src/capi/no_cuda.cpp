#include "capi/layer.h"

namespace crumb::capi {

const Backend* cuda_backend() { return nullptr; }

}  // namespace crumb::capi
