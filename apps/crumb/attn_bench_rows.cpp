// Rows to attend: random ones, or those of a model at work.
#include "attn_bench.h"
#include "session.h"

#include <crumb/error.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "ggml.h"

namespace crumb::app::attn {

std::string Shape::name() const { return fmt::format("{}/{}x{}", n_head, n_head_kv, dim); }

Rows random_rows(const Shape& shape, int tokens) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    Rows rows{shape, tokens, {}, {}, {}};
    const auto fill = [&](std::vector<float>& to, int heads, float spread) {
        to.resize(size_t(tokens) * heads * shape.dim);
        for (size_t i = 0; i < to.size(); i += shape.dim) {
            const float gain = std::exp(spread * normal(random));
            for (int c = 0; c < shape.dim; ++c) { to[i + c] = gain * normal(random); }
        }
    };
    fill(rows.k, shape.n_head_kv, 0.3f);
    fill(rows.v, shape.n_head_kv, 0.5f);
    fill(rows.q, shape.n_head, 0.0f);
    return rows;
}

namespace {

// Copies the sources of crumb's own nodes of one layer: kv_stored-N has K and V, the one behind kqv_out-N has Q.
struct Recorder {
    int layer;
    Rows rows;

    static void append(std::vector<float>& to, const ggml_tensor* t) {
        for (int64_t token = 0; token < t->ne[2]; ++token) {
            for (int64_t head = 0; head < t->ne[1]; ++head) {
                const auto* row = reinterpret_cast<const float*>(static_cast<const char*>(t->data) + token * t->nb[2] + head * t->nb[1]);
                to.insert(to.end(), row, row + t->ne[0]);
            }
        }
    }

    static bool callback(ggml_tensor* node, bool ask, void* data) {
        auto& self = *static_cast<Recorder*>(data);
        const bool stored = fmt::format("kv_stored-{}", self.layer) == node->name;
        const bool attended = fmt::format("kqv_out-{}", self.layer) == node->name;
        if (ask) { return stored || attended; }
        if (stored) {
            const auto* k = node->src[0];
            self.rows.shape.n_head_kv = int(k->ne[1]);
            self.rows.shape.dim = int(k->ne[0]);
            append(self.rows.k, k);
            append(self.rows.v, node->src[1]);
        }
        if (attended) {
            const ggml_tensor* t = node;
            while (t->op != GGML_OP_CUSTOM && t->src[0]) { t = t->src[0]; }
            if (t->op != GGML_OP_CUSTOM) { return true; }
            self.rows.shape.n_head = int(t->src[0]->ne[1]);
            append(self.rows.q, t->src[0]);
        }
        return true;
    }
};

}  // namespace

Rows record_rows(const std::filesystem::path& file, const std::filesystem::path& text, int layer, int tokens, int n_threads) {
    const auto model = llama::load_model(file);
    if (layer < 0 || layer >= llama_model_n_layer(model.get())) {
        fail("there is no layer {} in {}: it has {}", layer, file.string(), llama_model_n_layer(model.get()));
    }
    auto words = llama::tokenize(model.get(), llama::read_text(text), true, false);
    if (words.size() < 64) { fail("{} has {} tokens: too few to record from", text.string(), words.size()); }
    for (size_t i = 0; int(words.size()) < tokens; ++i) { words.push_back(words[i]); }
    words.resize(tokens);

    Recorder recorder{layer, {}};
    llama::ContextOptions options{.n_ctx = (tokens + 255) / 256 * 256, .n_threads = n_threads};
    options.observe = Recorder::callback;
    options.observer = &recorder;
    llama::KvOptions kv;
    kv.recipe = "bf16";
    const auto context = llama::new_context(model.get(), options, kv);
    for (int at = 0; at < tokens; at += options.n_ubatch) {
        const int n = std::min(options.n_ubatch, tokens - at);
        llama::decode(context.get(), std::span(words).subspan(at, n), at, true);
    }
    Rows& rows = recorder.rows;
    rows.tokens = tokens;
    const Shape& s = rows.shape;
    if (rows.k.size() != size_t(tokens) * s.n_head_kv * s.dim || rows.v.size() != rows.k.size() ||
        rows.q.size() != size_t(tokens) * s.n_head * s.dim) {
        fail("layer {} of {} was not seen as rows of equal heads: sliding windows, shared K and V or D_k != D_v; take another "
             "layer", layer, file.string());
    }
    return std::move(rows);
}

}  // namespace crumb::app::attn
