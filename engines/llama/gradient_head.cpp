#include "gradient_head.h"

#include <crumb/error.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>

#include "ggml-backend.h"
#include "ggml.h"
#include "gradient_rules.h"

namespace crumb::llama {

namespace {

constexpr size_t kLogitBytes = 128 << 20, kWeightBytes = 32 << 20;
constexpr int kMostPositions = 512;

}  // namespace

uint64_t mixed(uint64_t seed, uint64_t index) {
    uint64_t z = seed + (index + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

double draw(float* x, int n, uint64_t seed) {
    const float top = *std::max_element(x, x + n);
    double sum = 0;
    for (int i = 0; i < n; ++i) {
        x[i] = std::exp(x[i] - top);
        sum += x[i];
    }
    double left = double(mixed(seed, 0) >> 11) * 0x1p-53 * sum;
    int y = 0;
    while (y < n - 1 && left >= x[y]) {
        left -= x[y++];
    }
    const double loss = std::log(sum) - std::log(double(x[y]));
    for (int i = 0; i < n; ++i) {
        x[i] = float(x[i] / sum);
    }
    x[y] -= 1;
    return loss;
}

Head::Head(ggml_tensor* logits, ggml_tensor* hidden, int n_threads)
    : hidden_(hidden), n_threads_(n_threads), context_(new_descriptions(2)) {
    ggml_tensor* node = logits;
    for (; node->op == GGML_OP_SCALE || (node->op == GGML_OP_ADD && node->src[1]->op == GGML_OP_NONE);
         node = node->src[0]) {
        steps_.insert(steps_.begin(), node);
    }
    if (node->op != GGML_OP_MUL_MAT || node->src[1] != hidden || node->src[0]->op != GGML_OP_NONE) {
        fail("between its last norm and its logits is {} ({}), where one product of weights is expected",
             ggml_op_desc(node), node->name);
    }
    weight_ = node->src[0];
    const size_t fit = kLogitBytes / sizeof(float) / size_t(logits->ne[0]);
    positions_ = int(std::clamp<size_t>(fit / 16 * 16, 16, kMostPositions));
    positions_ = int(std::min<int64_t>(positions_, hidden->ne[1]));
    logits_ = ggml_new_tensor_2d(context_.get(), GGML_TYPE_F32, logits->ne[0], positions_);
    kept_ = std::make_unique<Kept>(context_.get());
}

int Head::slices(int first) const {
    return int((std::max<int64_t>(hidden_->ne[1] - first, 0) + positions_ - 1) / positions_);
}

ggml_tensor* Head::forward(ggml_context* c, int position, int n) const {
    ggml_tensor* x = ggml_view_2d(c, hidden_, hidden_->ne[0], n, hidden_->nb[1], size_t(position) * hidden_->nb[1]);
    x = ggml_mul_mat(c, weight_, x);
    for (const ggml_tensor* step : steps_) {
        float scale, bias;
        std::memcpy(&scale, step->op_params, sizeof(scale));
        std::memcpy(&bias, step->op_params + 1, sizeof(bias));
        x = step->op == GGML_OP_SCALE ? ggml_scale_bias(c, x, scale, bias) : ggml_add(c, x, step->src[1]);
    }
    return x;
}

ggml_tensor* Head::back(ggml_context* c, ggml_tensor* g) const {
    for (const ggml_tensor* step : steps_) {
        if (step->op == GGML_OP_SCALE) {
            float scale;
            std::memcpy(&scale, step->op_params, sizeof(scale));
            g = ggml_scale(c, g, scale);
        }
    }
    const int64_t n_vocab = weight_->ne[1];
    const int64_t rows = std::max<int64_t>(kWeightBytes / (sizeof(float) * size_t(weight_->ne[0])) / 16 * 16, 16);
    ggml_tensor* sum = nullptr;
    for (int64_t row = 0; row < n_vocab; row += rows) {
        const int64_t n = std::min(rows, n_vocab - row);
        ggml_tensor* w = ggml_view_2d(c, weight_, weight_->ne[0], n, weight_->nb[1], size_t(row) * weight_->nb[1]);
        if (w->type != GGML_TYPE_F32) {
            w = ggml_cast(c, w, GGML_TYPE_F32);
        }
        ggml_tensor* some = ggml_cont(c, ggml_view_2d(c, g, n, g->ne[1], g->nb[1], size_t(row) * sizeof(float)));
        some = ggml_mul_mat(c, transposed(c, w), some);  // [n_embd, positions]
        sum = sum ? ggml_add(c, sum, some) : some;
    }
    return sum;
}

double Head::run(Compute& compute, uint64_t seed, int first, ggml_tensor* gradient,
                 const std::function<void()>& progress) {
    const int n = int(hidden_->ne[1]), n_vocab = int(logits_->ne[0]);
    auto* out = static_cast<char*>(gradient->data);
    std::memset(out, 0, ggml_nbytes(gradient));
    const Cut cut(hidden_);
    double loss = 0;
    for (int position = first; position < n; position += positions_) {
        const int m = std::min(positions_, n - position);
        auto* data = static_cast<float*>(logits_->data);
        {
            const ggml_context_ptr c = new_descriptions(64);
            ggml_tensor* x = forward(c.get(), position, m);
            compute.run({x}, [&] { std::memcpy(data, x->data, ggml_nbytes(x)); });
        }
        std::vector<double> losses(m);
        const auto work = [&](int thread) {
            for (int i = thread; i < m; i += n_threads_) {
                losses[i] = draw(data + size_t(i) * n_vocab, n_vocab, mixed(seed, uint64_t(position + i)));
            }
        };
        {
            std::vector<std::jthread> others;
            for (int thread = 1; thread < n_threads_; ++thread) {
                others.emplace_back(work, thread);
            }
            work(0);
        }
        for (const double x : losses) {
            loss += x;
        }
        const ggml_context_ptr c = new_descriptions(4096);
        ggml_tensor* g = ggml_view_2d(c.get(), logits_, n_vocab, m, logits_->nb[1], 0);
        ggml_tensor* back_to = back(c.get(), g);
        compute.run({back_to}, [&] {
            std::memcpy(out + size_t(position) * gradient->nb[1], back_to->data, ggml_nbytes(back_to));
        });
        progress();
    }
    return loss;
}

}  // namespace crumb::llama
