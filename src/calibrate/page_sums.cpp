#include <crumb/calibrate.h>
#include <crumb/error.h>

#include <algorithm>
#include <limits>

#include "calibrate/gram.h"

namespace crumb {

namespace {

// A symmetric mean from sums on and above the diagonal.
void add_mean(std::vector<double>& mean, const std::vector<double>& sum, int d, double count) {
    for (int i = 0; i < d; ++i) {
        for (int j = i; j < d; ++j) {
            const double x = sum[size_t(i) * d + j] / count;
            mean[size_t(i) * d + j] += x;
            if (j > i) {
                mean[size_t(j) * d + i] += x;
            }
        }
    }
}

}  // namespace

PageSums::PageSums(int dim_k, int dim_v) : k_(side(dim_k)), v_(side(dim_v)) {}

PageSums::Side PageSums::side(int dim) {
    const size_t d = size_t(dim);
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    Side side{dim, std::vector<double>(kPageTokens * d), {}};
    for (Sums& sums : side.folds) {
        sums = {0,
                std::vector<double>(d),
                std::vector<double>(d * d),
                std::vector<double>(d * d),
                std::vector<double>(d, kInfinity),
                std::vector<double>(d, -kInfinity)};
    }
    return side;
}

void PageSums::finish(Side& side, int fold) {
    const int dim = side.dim;
    Sums& sums = side.folds[fold];
    std::vector<double> mean(dim);
    for (int t = 0; t < kPageTokens; ++t) {
        for (int i = 0; i < dim; ++i) {
            mean[i] += side.rows[size_t(t) * dim + i] / kPageTokens;
        }
    }
    for (int i = 0; i < dim; ++i) {
        sums.mean[i] += mean[i];
        sums.least[i] = std::min(sums.least[i], mean[i]);
        sums.most[i] = std::max(sums.most[i], mean[i]);
    }
    add_gram(mean.data(), 1, dim, sums.between.data());
    for (int t = 0; t < kPageTokens; ++t) {
        for (int i = 0; i < dim; ++i) {
            side.rows[size_t(t) * dim + i] -= mean[i];
        }
    }
    add_gram(side.rows.data(), kPageTokens, dim, sums.within.data());
    ++sums.pages;
}

void PageSums::add(const HeadRows& k, const HeadRows& v, int head, int n_tokens, uint64_t position, int fold) {
    for (int t = 0; t < n_tokens; ++t, ++position) {
        const int row = int(position % kPageTokens);
        if (row != filled_) {
            filled_ = 0;
            if (row != 0) {
                continue;
            }
        }
        for (const auto& [rows, side] : {std::pair{&k, &k_}, std::pair{&v, &v_}}) {
            const float* x = rows->data + size_t(t) * rows->token_stride + size_t(head) * rows->head_stride;
            std::copy(x, x + side->dim, side->rows.begin() + size_t(row) * side->dim);
        }
        if (++filled_ < kPageTokens) {
            continue;
        }
        filled_ = 0;
        if (pages_ % stride_ == 0 && sample_.size() == kSamplePages) {
            for (size_t i = 1; 2 * i < sample_.size(); ++i) {
                sample_[i] = std::move(sample_[2 * i]);
            }
            sample_.resize(kSamplePages / 2);
            stride_ *= 2;
        }
        if (pages_ % stride_ == 0) {
            const auto rounded = [](const std::vector<double>& rows) {
                std::vector<bf16> result(rows.size());
                std::ranges::transform(rows, result.begin(), [](double x) { return to_bf16(float(x)); });
                return result;
            };
            sample_.push_back({fold, rounded(k_.rows), rounded(v_.rows)});
        }
        ++pages_;
        finish(k_, fold);
        finish(v_, fold);
    }
}

PageMoments PageSums::moments(const Side& side, int fold) {
    const int d = side.dim;
    PageMoments m{0,
                  std::vector<double>(d),
                  std::vector<double>(size_t(d) * d),
                  std::vector<double>(size_t(d) * d),
                  side.folds[0].least,
                  side.folds[0].most};
    for (int f = 0; f < kFolds; ++f) {
        m.pages += fold < 0 || f == fold ? side.folds[f].pages : 0;
    }
    if (m.pages == 0) {
        return m;
    }
    std::ranges::fill(m.least, std::numeric_limits<double>::infinity());
    std::ranges::fill(m.most, -std::numeric_limits<double>::infinity());
    for (int f = 0; f < kFolds; ++f) {
        const Sums& sums = side.folds[f];
        if (fold >= 0 && f != fold) {
            continue;
        }
        for (int i = 0; i < d; ++i) {
            m.mean[i] += sums.mean[i] / double(m.pages);
            m.least[i] = std::min(m.least[i], sums.least[i]);
            m.most[i] = std::max(m.most[i], sums.most[i]);
        }
        add_mean(m.within, sums.within, d, double(m.pages) * kPageTokens);
        add_mean(m.between, sums.between, d, double(m.pages));
    }
    return m;
}

}  // namespace crumb
