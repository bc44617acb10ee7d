#include "gradient.h"

#include <crumb/error.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>

#include "calibrate/fingerprint.h"
#include "calibrate/gram.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "gradient_rules.h"
#include "llama-arch.h"
#include "llama-context.h"
#include "llama-model.h"
#include "progress.h"

namespace crumb::llama {

// --- one window

// Descriptions of a layer's way back, and what it computes.
struct WindowGradient::Back {
    explicit Back(size_t n) : context(new_descriptions(n)), reverse(context.get()) {}

    ggml_context_ptr context;
    Reverse reverse;
    ggml_tensor* to_input = nullptr;
    WindowAttention::FarGradient far;
};

WindowGradient::WindowGradient(llama_context* context, int n_tokens, FarRule rule, int n_threads)
    : rule_(rule),
      attention_(n_tokens, rule, attention_windows(context->get_model())),
      graph_(context, n_tokens,
             [this](ggml_context* c, const AttentionCall& call) { return attention_.forward(c, call); }),
      head_(graph_.logits(), graph_.hidden(), n_threads),
      context_(new_descriptions(2)) {
    ggml_tensor* hidden = graph_.hidden();
    gradient_ = ggml_new_tensor_2d(context_.get(), GGML_TYPE_F32, hidden->ne[0], hidden->ne[1]);
    kept_ = std::make_unique<Kept>(context_.get());
    lowest_ = graph_.n_layer();
    for (const auto& [layer, attention] : graph_.attentions()) {
        if (attention.call.window == 0) {
            lowest_ = std::min(lowest_, layer);
        }
    }
    if (lowest_ == graph_.n_layer()) {
        fail("no layer keeps K and V of the whole context");
    }
    for (int il = 0; il <= graph_.n_layer(); ++il) {
        work_.push_back(work(il));
    }
    const ggml_tensor* logits = graph_.logits();
    const int slices = std::max(1, head_.slices(rule_.sink + rule_.recent));
    head_work_ = 2.0 * double(hidden->ne[0]) * double(logits->ne[0]) *
                 far_rows(n_tokens, rule_) / slices;
}

WindowGradient::Work WindowGradient::work(int layer) const {
    const double n = graph_.n_tokens();
    double weights = 0, pairs = 0;
    const Cut cut(graph_.input(layer));
    for (const ggml_tensor* node : nodes_of(graph_.output(layer))) {
        if (node->op == GGML_OP_MUL_MAT && node->src[0]->op == GGML_OP_NONE) {
            weights += n * double(ggml_nelements(node->src[0]));
        }
    }
    if (const auto found = graph_.attentions().find(layer); found != graph_.attentions().end()) {
        const AttentionCall& call = found->second.call;
        const double keys = call.window > 0 ? std::min<double>(call.window, n / 2) : n / 2;
        pairs = n * keys * double(call.q->ne[1]) * double(call.k->ne[0] + call.v->ne[0]);
    }
    return {weights + pairs, layer >= lowest_ ? 2 * weights + 4 * pairs : 0};
}

double WindowGradient::work() const {
    double sum = head_work_ * head_.slices(rule_.sink + rule_.recent);
    for (const Work& w : work_) {
        sum += w.forward + w.back;
    }
    return sum;
}

size_t WindowGradient::kept_bytes() const {
    return kept_->bytes() + graph_.kept_bytes() + head_.kept_bytes();
}

void WindowGradient::emit(Back& back, int layer) {
    ggml_tensor* input = layer > lowest_ ? graph_.input(layer) : nullptr;
    if (input) {
        back.reverse.want(input);
    }
    if (const auto found = graph_.attentions().find(layer); found != graph_.attentions().end()) {
        const auto& attention = found->second;
        back.reverse.set_rule(attention.output, [&](Reverse& reverse, ggml_tensor* gradient) {
            back.far = attention_.back(reverse, attention.call, gradient);
        });
    }
    back.reverse.run(nodes_of(graph_.output(layer)), graph_.output(layer), gradient_);
    if (input) {
        back.to_input = back.reverse.gradient(input);
        if (!back.to_input) {
            fail("layer {} does not depend on the layer before it", layer);
        }
        back.to_input = ggml_cont(back.context.get(), back.to_input);
    }
}

namespace {

// Tensors of the way back through a layer: some hundred, and some dozen a block of queries.
size_t descriptions(int n_tokens) {
    return 4096 + 160 * size_t(n_tokens / WindowAttention::kBlock + 1);
}

}  // namespace

void WindowGradient::require_rules() {
    for (int il = graph_.n_layer(); il >= lowest_; --il) {
        const Cut cut(graph_.input(il));
        Back back(descriptions(graph_.n_tokens()));
        emit(back, il);
    }
}

double WindowGradient::run(Compute& compute, std::span<const llama_token> tokens, uint64_t seed,
                           const std::function<void(const RowGradients&)>& each,
                           const std::function<void(double)>& progress) {
    graph_.set_tokens(tokens);
    for (int il = 0; il <= graph_.n_layer(); ++il) {
        const Cut cut(graph_.input(il));
        compute.run({graph_.output(il)});
        progress(work_[il].forward);
    }
    const int first = rule_.sink + rule_.recent;
    const double loss = head_.run(compute, seed, first, gradient_, [&] { progress(head_work_); });
    for (int il = graph_.n_layer(); il >= lowest_; --il) {
        const Cut cut(graph_.input(il));
        Back back(descriptions(graph_.n_tokens()));
        emit(back, il);
        std::vector<ggml_tensor*> results;
        for (ggml_tensor* result : {back.to_input, back.far.k, back.far.v}) {
            if (result) {
                results.push_back(result);
            }
        }
        compute.run(
            results,
            [&] {
                if (back.to_input) {
                    std::memcpy(gradient_->data, back.to_input->data, ggml_nbytes(gradient_));
                }
                if (back.far.k) {
                    each({il, graph_.n_tokens(), int(back.far.k->ne[2]), int(back.far.k->ne[0]),
                          int(back.far.v->ne[0]), static_cast<const float*>(back.far.k->data),
                          static_cast<const float*>(back.far.v->data)});
                }
            },
            back.reverse.order());
        progress(work_[il].back);
    }
    return loss;
}

// --- all windows

namespace {

// sum[d][d] = sum of g^T g over the far rows of one head, rows of more than `clip` median lengths made that long and the
// whole scaled to the trace it has without that: a few rows then decide how much this head matters, but not which way.
void add_rows(const float* g, int dim, int first, int end, double clip, std::vector<double>& sum) {
    sum.resize(size_t(dim) * dim);
    std::vector<double> lengths;
    double trace = 0, clipped = 0;
    for (int j = first; j < end; ++j) {
        double square = 0;
        for (int i = 0; i < dim; ++i) {
            square += double(g[size_t(j) * dim + i]) * g[size_t(j) * dim + i];
        }
        lengths.push_back(std::sqrt(square));
        trace += lengths.back() * lengths.back();
    }
    double longest = INFINITY;
    if (clip > 0) {
        std::vector<double> sorted = lengths;
        std::nth_element(sorted.begin(), sorted.begin() + std::ptrdiff_t(sorted.size() / 2), sorted.end());
        longest = clip * sorted[sorted.size() / 2];
    }
    std::vector<double> rows(size_t(end - first) * dim);
    for (int j = first; j < end; ++j) {
        const double length = lengths[j - first], scale = length > longest ? longest / length : 1.0;
        for (int i = 0; i < dim; ++i) {
            rows[size_t(j - first) * dim + i] = scale * g[size_t(j) * dim + i];
        }
        clipped += scale * length * scale * length;
    }
    add_gram(rows.data(), end - first, dim, sum.data());
    const double factor = clipped < trace && clipped > 0 ? trace / clipped : 1.0;
    for (int i = 0; i < dim; ++i) {
        for (int j = i; j < dim; ++j) {
            sum[size_t(j) * dim + i] = sum[size_t(i) * dim + j] *= factor;
        }
    }
}

LayerMetric layer_sums(const RowGradients& g, const GradientOptions& o) {
    LayerMetric layer;
    layer.heads.resize(g.n_head_kv);
    layer.tokens = uint64_t(far_rows(g.n_tokens, o.rule));
    const int n_threads = std::min(o.n_threads, g.n_head_kv);
    const auto work = [&](int thread) {
        for (int h = thread; h < g.n_head_kv; h += n_threads) {
            const size_t row = size_t(h) * g.n_tokens;
            const int first = o.rule.sink, end = g.n_tokens - o.rule.recent;
            add_rows(g.k + row * g.dim_k, g.dim_k, first, end, o.clip, layer.heads[h].k);
            add_rows(g.v + row * g.dim_v, g.dim_v, first, end, o.clip, layer.heads[h].v);
        }
    };
    std::vector<std::jthread> others;
    for (int thread = 1; thread < n_threads; ++thread) {
        others.emplace_back(work, thread);
    }
    work(0);
    return layer;
}

void require_finite(const RowGradients& g) {
    for (const auto& [data, dim] : {std::pair{g.k, g.dim_k}, {g.v, g.dim_v}}) {
        const size_t n = size_t(dim) * g.n_tokens * g.n_head_kv;
        if (!std::all_of(data, data + n, [](float x) { return std::isfinite(x); })) {
            fail("layer {}: the gradient is not finite, so this model overflows somewhere. Type --metric local or "
                 "--metric none instead of --metric gradient",
                 g.layer);
        }
    }
}

Identity identity_of(std::span<const std::vector<llama_token>> windows, std::span<const int> folds,
                     const GradientOptions& o) {
    Fingerprint tokens;
    for (size_t w = 0; w < windows.size(); ++w) {
        tokens.add_value(uint64_t(folds[w]));
        tokens.add_value(uint64_t(windows[w].size()));
        tokens.add(std::as_bytes(std::span(windows[w])));
    }
    return {{"model", o.model_hash},
            {"text", tokens.hex()},
            {"seed", std::to_string(o.seed)},
            {"clip", fmt::format("{}", o.clip)},
            {"sink", std::to_string(o.rule.sink)},
            {"recent", std::to_string(o.rule.recent)}};
}

void add(Metric& sums, int number, const LayerMetric& more) {
    LayerMetric& layer = sums[number];
    layer.tokens += more.tokens;
    layer.heads.resize(more.heads.size());
    for (size_t h = 0; h < more.heads.size(); ++h) {
        for (const auto side : {&HeadMetric::k, &HeadMetric::v}) {
            const auto& from = more.heads[h].*side;
            auto& to = layer.heads[h].*side;
            to.resize(from.size());
            std::transform(from.begin(), from.end(), to.begin(), to.begin(), std::plus{});
        }
    }
}

Metric mean_of(Metric sums) {
    for (auto& [number, layer] : sums) {
        for (HeadMetric& head : layer.heads) {
            for (auto* side : {&head.k, &head.v}) {
                for (double& x : *side) {
                    x /= double(layer.tokens);
                }
            }
        }
    }
    return sums;
}

}  // namespace

std::vector<Metric> gradient_metrics(llama_model* model, std::span<const std::vector<llama_token>> all,
                                     std::span<const int> all_folds, const GradientOptions& o) {
    CRUMB_ASSERT(all.size() == all_folds.size());
    if (!o.checkpoint.empty()) {
        require_checkpoint_output(o.checkpoint);
    }
    std::vector<std::vector<llama_token>> windows;
    std::vector<int> folds;
    for (size_t w = 0; w < all.size(); ++w) {
        if (far_rows(int(all[w].size()), o.rule) > 0) {
            windows.push_back(all[w]);
            folds.push_back(all_folds[w]);
        }
    }
    if (windows.empty()) {
        fail("no window of the texts is longer than the {} + {} tokens that the cache keeps exact: --metric gradient "
             "needs longer windows (-c) and texts",
             o.rule.sink, o.rule.recent);
    }

    ContextPtr context;
    std::unique_ptr<WindowGradient> window;  // of the length in hand: each has buffers of its own
    size_t length = 0;
    const auto set_length = [&](size_t n) {
        if (n != length) {
            window.reset();
            window = std::make_unique<WindowGradient>(context.get(), int(n), o.rule, o.n_threads);
            length = n;
        }
    };
    try {
        context = plain_context(model);
        set_length(windows[0].size());
        window->require_rules();
    } catch (const Error& e) {
        fail("--metric gradient does not support this model (architecture '{}'): {}. Type --metric local, which needs no "
             "backward pass, or --metric none",
             llm_arch_name(model->arch), e.what());
    }
    const Identity identity = identity_of(windows, folds, o);
    GradientSums sums;
    if (!o.checkpoint.empty()) {
        sums = read_checkpoint(o.checkpoint, identity);
        if (sums.windows > 0) {
            std::fprintf(stderr, "gradient: %zu of %zu windows are in %s\n", sums.windows, windows.size(),
                         o.checkpoint.c_str());
        }
    }
    double total = 0;
    for (size_t w = sums.windows; w < windows.size(); ++w) {
        total += window->work() / double(length) * double(windows[w].size());
    }

    Compute compute(o.n_threads);
    Progress progress("gradient", total);
    double work = 0, loss = 0;
    uint64_t positions = 0;
    size_t bytes = 0;
    for (size_t w = sums.windows; w < windows.size(); ++w) {
        set_length(windows[w].size());
        loss += window->run(
            compute, windows[w], mixed(o.seed, w),
            [&](const RowGradients& g) {
                require_finite(g);
                add(sums.parts[size_t(folds[w])], g.layer, layer_sums(g, o));
            },
            [&](double more) {
                work += more;
                progress.at(std::min(work, total), fmt::format("window {} of {}, {:.0f} %", w + 1, windows.size(),
                                                               100 * std::min(1.0, work / total)));
            });
        positions += uint64_t(far_rows(int(windows[w].size()), o.rule));
        bytes = std::max(bytes, window->kept_bytes() + compute.scratch_bytes());
        sums.windows = w + 1;
        if (!o.checkpoint.empty()) {
            write_checkpoint(o.checkpoint, identity, sums);
        }
    }
    if (positions > 0) {
        std::fprintf(stderr, "gradient: loss %.3f nats a position, %.0f s, %.2f GB beside the weights\n",
                     loss / double(positions), progress.seconds(), double(bytes) / 1e9);
    }
    std::vector<Metric> metrics;
    for (Metric& part : sums.parts) {
        if (!part.empty()) {
            metrics.push_back(mean_of(std::move(part)));
        }
    }
    if (metrics.size() > 1) {
        const Disagreement d = disagreement(metrics[0], metrics[1]);
        std::fprintf(stderr, "gradient: its shapes from two halves of the text differ by %.0f %% (K) and %.0f %% (V), median of "
                             "the heads: planes trusts them accordingly, more --tokens bring them closer\n",
                     100 * d.k, 100 * d.v);
    }
    return metrics;
}

}  // namespace crumb::llama
