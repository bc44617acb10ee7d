#include "projections.h"

#include <crumb/error.h>

#include <cstring>
#include <vector>

#include "ggml-backend.h"
#include "ggml.h"
#include "llama-arch.h"
#include "llama-model.h"

namespace crumb::llama {

namespace {

std::vector<float> dequantised(const ggml_tensor* t) {
    std::vector<std::byte> bytes(ggml_nbytes(t));
    ggml_backend_tensor_get(t, bytes.data(), 0, bytes.size());
    std::vector<float> values(size_t(ggml_nelements(t)));
    if (t->type == GGML_TYPE_F32) {
        std::memcpy(values.data(), bytes.data(), bytes.size());
    } else {
        ggml_get_type_traits(t->type)->to_float(bytes.data(), values.data(), int64_t(values.size()));
    }
    return values;
}

}  // namespace

void set_projections(LocalMetric& metric, const llama_model& model) {
    const auto& h = model.hparams;
    const auto refuse = [&](std::string_view what) {
        fail("--metric local does not support this model (architecture '{}'): {}. Type --metric none",
             llm_arch_name(model.arch), what);
    };
    if (h.is_mla()) {
        refuse("latent attention (MLA)");
    }
    if (h.attn_soft_cap || model.arch == LLM_ARCH_GROK) {
        refuse("soft caps on the attention logits");
    }
    if (h.use_alibi || h.f_max_alibi_bias > 0) {
        refuse("ALiBi");
    }
    if (!h.causal_attn || llama_model_has_encoder(&model)) {
        refuse("attention that is not causal");
    }
    if (h.swa_type != LLAMA_SWA_TYPE_NONE && h.swa_type != LLAMA_SWA_TYPE_STANDARD) {
        refuse("chunked or symmetric sliding windows");
    }
    int measured = 0;
    for (int il = 0; il < int(h.n_layer()); ++il) {
        const bool attends = h.n_head_kv(il) > 0 && !h.is_recr(il);
        if (attends && !h.has_kv(il)) {
            refuse(fmt::format("layer {} reads the K and V of another", il));
        }
        if (!attends || (h.swa_type == LLAMA_SWA_TYPE_STANDARD && h.is_swa(il))) {
            continue;
        }
        const auto& layer = model.layers.at(il);
        if (layer.attn_sinks) {
            refuse(fmt::format("layer {} has attention sinks", il));
        }
        const LayerShape shape{int(h.n_head(il)), int(h.n_head_kv(il)), int(h.n_embd_head_k(il)), int(h.n_embd_head_v(il))};
        const ggml_tensor* wo = layer.wo;
        if (!wo || layer.wo_s || !ggml_is_matrix(wo) || wo->ne[0] != int64_t(shape.n_head) * shape.dim_v ||
            shape.n_head % shape.n_head_kv != 0) {
            refuse(fmt::format("layer {} has no single matrix behind its {} heads of {} channels", il, shape.n_head,
                               shape.dim_v));
        }
        metric.set_projection(il, shape, dequantised(wo));
        ++measured;
    }
    if (measured == 0) {
        refuse("no layer keeps K and V of the whole context");
    }
}

}  // namespace crumb::llama
