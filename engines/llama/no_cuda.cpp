#include <crumb/error.h>

#include "cuda_layers.h"

namespace crumb::llama {

std::unique_ptr<CudaLayers> CudaLayers::make(const llama_model& model, const llama_cparams& cparams, const CacheConfig& config,
                                             const std::vector<int>& owner, bool) {
    for (size_t il = 0; il < config.layers.size() && cparams.offload_kqv; ++il) {
        ggml_backend_dev_t device = owner[il] < 0 ? nullptr : model.dev_layer(int(il));
        if (device && ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_CPU) {
            fail("layer {} is on {}, and this build of crumb has no attention for it: keep the KV cache on the CPU "
                 "(--no-kv-offload), keep the layers there (-ngl 0), or build with -DCRUMB_CUDA=ON",
                 il, ggml_backend_dev_name(device));
        }
    }
    return nullptr;
}

}  // namespace crumb::llama
