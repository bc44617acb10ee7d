#include "observer.h"

#include <crumb/error.h>

#include <charconv>
#include <cstring>
#include <optional>

#include "ggml-backend.h"
#include "ggml.h"
#include "llama-arch.h"
#include "llama-model.h"

namespace crumb::llama {

namespace {

// The N of a name "prefixN".
std::optional<int> layer_of(const char* name, std::string_view prefix) {
    const std::string_view text(name);
    int layer = 0;
    if (!text.starts_with(prefix)) {
        return std::nullopt;
    }
    const auto [end, error] = std::from_chars(name + prefix.size(), name + text.size(), layer);
    if (error != std::errc{} || end != name + text.size()) {
        return std::nullopt;
    }
    return layer;
}

// SET_ROWS returns a view of the cache tensor that it writes to.
std::optional<int> stored_in(const ggml_tensor* node, std::string_view prefix) {
    if (node->op != GGML_OP_SET_ROWS || !node->view_src) {
        return std::nullopt;
    }
    return layer_of(node->view_src->name, prefix);
}

const ggml_tensor* behind_views(const ggml_tensor* t) {
    while (t->op == GGML_OP_RESHAPE || t->op == GGML_OP_VIEW || t->op == GGML_OP_PERMUTE ||
           t->op == GGML_OP_TRANSPOSE) {
        t = t->src[0];
    }
    return t;
}

// The scale of a layer's softmax: of the node behind kqv_out-N. Throws Error unless it is a plain softmax.
float softmax_scale(int layer, const ggml_tensor* attention) {
    if (attention->op == GGML_OP_CONT) {
        attention = behind_views(attention->src[0]);
    }
    const bool fused = attention->op == GGML_OP_FLASH_ATTN_EXT;
    const ggml_tensor* softmax = fused ? attention : attention->src[1];
    if (!fused && (attention->op != GGML_OP_MUL_MAT || softmax->op != GGML_OP_SOFT_MAX)) {
        fail("layer {}: {} instead of a softmax: this attention is not supported by --metric local, type --metric none",
             layer, ggml_op_name(attention->op));
    }
    float scale, slope, cap = 0;
    std::memcpy(&scale, softmax->op_params, sizeof(scale));
    std::memcpy(&slope, softmax->op_params + 1, sizeof(slope));
    if (fused) {
        std::memcpy(&cap, softmax->op_params + 2, sizeof(cap));
    }
    if (slope != 0 || cap != 0 || softmax->src[fused ? 4 : 2]) {
        fail("layer {}: a softmax with ALiBi, a soft cap or sinks is not supported by --metric local, type --metric none",
             layer);
    }
    return scale;
}

}  // namespace

// Tensors lie on any device and may be views with gaps: one transfer of the span they cover.
Observer::Copy Observer::copy(const ggml_tensor* t) {
    if (t->type != GGML_TYPE_F32) {
        fail("tensor {} is {}: calibration reads F32 activations", t->name, ggml_type_name(t->type));
    }
    Copy result;
    result.data.resize(ggml_nbytes(t) / sizeof(float));
    ggml_backend_tensor_get(t, result.data.data(), 0, result.data.size() * sizeof(float));
    for (int i = 0; i < 4; ++i) {
        result.shape[i] = t->ne[i];
        result.stride[i] = int64_t(t->nb[i] / sizeof(float));
    }
    return result;
}

// RoPE nodes are asked for as well, though nothing is taken there: a GPU backend would otherwise fuse RoPE with the
// store that follows and leave no K behind.
bool Observer::wanted(const ggml_tensor* node) {
    return node->op == GGML_OP_ROPE || stored_in(node, "cache_k_l") || stored_in(node, "cache_v_l") ||
           layer_of(node->name, "kq-") || layer_of(node->name, "kv_stored-") || layer_of(node->name, "kqv_out-");
}

bool Observer::callback(ggml_tensor* node, bool ask, void* self) {
    auto& observer = *static_cast<Observer*>(self);
    if (observer.error_) {
        return !ask;
    }
    if (ask) {
        return wanted(node);
    }
    try {
        observer.take(node);
    } catch (...) {
        observer.error_ = std::current_exception();
    }
    return true;
}

void Observer::rethrow() const {
    if (error_) {
        std::rethrow_exception(error_);
    }
}

void Observer::take(const ggml_tensor* node) {
    if (const auto layer = stored_in(node, "cache_k_l")) {
        pending_[*layer].k = copy(node->src[0]);
    } else if (const auto layer = stored_in(node, "cache_v_l")) {
        pending_[*layer].v = copy(node->src[0]);
    } else if (const auto layer = layer_of(node->name, "kv_stored-")) {
        Pending& p = pending_[*layer];
        p.k = copy(node->src[0]);
        p.v = copy(node->src[1]);
    } else if (const auto layer = layer_of(node->name, "kq-"); layer && node->op == GGML_OP_MUL_MAT) {
        Pending& p = pending_[*layer];
        p.q = copy(node->src[1]);
        p.dim_k = int(node->src[0]->ne[0]);
        p.n_head_kv = int(node->src[0]->ne[2]);
    } else if (const auto layer = layer_of(node->name, "kqv_out-")) {
        take_output(*layer, node);
    }
}

void Observer::take_output(int layer, const ggml_tensor* node) {
    const auto found = pending_.find(layer);
    if (found == pending_.end() || found->second.k.data.empty()) {
        return;
    }  // reads the K and V of another layer
    Pending p = std::move(found->second);
    pending_.erase(found);

    // q as attention reads it, [dim_k, tokens, heads] from llama.cpp and [dim_k, heads, tokens] from crumb
    const ggml_tensor* attention = behind_views(node);
    const bool ours = attention->op == GGML_OP_CUSTOM;
    if (ours) {
        p.q = copy(attention->src[0]);
        std::swap(p.q.shape[1], p.q.shape[2]);
        std::swap(p.q.stride[1], p.q.stride[2]);
        p.dim_k = int(p.k.shape[0]);
        p.n_head_kv = int(p.k.shape[1]);
    } else if (attention->op == GGML_OP_FLASH_ATTN_EXT) {
        p.q = copy(attention->src[0]);
        p.dim_k = int(attention->src[1]->ne[0]);
        p.n_head_kv = int(attention->src[1]->ne[2]);
    }
    const Copy output = copy(node);
    const int64_t n_tokens = output.shape[1], n_head = p.q.shape[2];
    if (p.q.data.empty() || n_head == 0 || p.q.shape[1] != n_tokens || p.q.shape[3] != 1) {
        fail("layer {}: {} queries of {} heads for {} outputs: this attention is not supported by calibration", layer,
             p.q.shape[1], n_head, n_tokens);
    }
    const LayerShape shape{int(n_head), p.n_head_kv, p.dim_k, int(output.shape[0] / n_head)};

    // K and V rows: [D, heads, tokens], [D * heads, tokens], or all in one row where V is stored transposed
    const auto rows = [&](const Copy& copy, int dim, const char* what) {
        const int64_t elements = copy.shape[0] * copy.shape[1] * copy.shape[2] * copy.shape[3];
        if (elements != int64_t(dim) * p.n_head_kv * n_tokens) {
            fail("layer {}: {} has {} elements, expected {} heads of {} channels for {} tokens", layer, what, elements,
                 p.n_head_kv, dim, n_tokens);
        }
        const size_t width = size_t(dim) * p.n_head_kv;
        if (copy.shape[0] == dim && copy.shape[1] == p.n_head_kv && copy.shape[2] == n_tokens) {
            return HeadRows{copy.data.data(), size_t(copy.stride[2]), size_t(copy.stride[1])};
        }
        const bool token_rows = copy.shape[0] == int64_t(width);
        return HeadRows{copy.data.data(), token_rows ? size_t(copy.stride[1]) : width, size_t(dim)};
    };
    const TokenBlock block{.n_tokens = int(n_tokens),
                           .q = {p.q.data.data(), size_t(p.q.stride[1]), size_t(p.q.stride[2])},
                           .k = rows(p.k, shape.dim_k, "K"),
                           .v = rows(p.v, shape.dim_v, "V"),
                           .output = {output.data.data(), size_t(output.stride[1]), size_t(shape.dim_v)}};
    moments_.observe(layer, shape, block);
    if (local_ && local_->measures(layer)) {
        local_->observe(layer, shape, softmax_scale(layer, attention), block);
    }
}

void Observer::require_all(const llama_model& model) const {
    rethrow();
    const auto& hparams = model.hparams;
    std::vector<int> layers;
    for (int il = 0; il < int(hparams.n_layer()); ++il) {
        if (hparams.has_kv(il) && hparams.n_head_kv(il) > 0 && !hparams.is_recr(il)) {
            layers.push_back(il);
        }
    }
    try {
        moments_.require(layers);
    } catch (const Error& e) {
        fail("architecture '{}': {}; its attention is built in a way that calibration does not know",
             llm_arch_name(model.arch), e.what());
    }
}

}  // namespace crumb::llama
