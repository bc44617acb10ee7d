#include "recipe/balance.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace crumb {

namespace {

constexpr int kRounds = 16;
constexpr double kLeastDeviation = 1e-3, kMostDeviation = 1e3;
constexpr double kLeastGain = 0.74081822068171788, kMostGain = 22026.465794806718;  // e^-0.3, e^10

// Of n numbers `stride` apart, about their mean.
double deviation(const double* x, size_t n, size_t stride) {
    double sum = 0, squares = 0;
    for (size_t i = 0; i < n; ++i) {
        sum += x[i * stride];
    }
    const double mean = sum / double(n);
    for (size_t i = 0; i < n; ++i) {
        const double d = x[i * stride] - mean;
        squares += d * d;
    }
    return std::clamp(std::sqrt(squares / double(n - 1)), kLeastDeviation, kMostDeviation);
}

struct Page {
    std::vector<double> y;  // divided by both gains
    size_t n_tokens, n_directions;

    void divide(std::span<const double> original, std::span<const double> tokens, std::span<const double> directions) {
        for (size_t t = 0; t < n_tokens; ++t) {
            for (size_t j = 0; j < n_directions; ++j) {
                y[t * n_directions + j] = original[t * n_directions + j] / (tokens[t] * directions[j]);
            }
        }
    }
    std::vector<double> rows() const {
        std::vector<double> all(n_tokens);
        for (size_t t = 0; t < n_tokens; ++t) {
            all[t] = deviation(&y[t * n_directions], n_directions, 1);
        }
        return all;
    }
    std::vector<double> columns() const {
        std::vector<double> all(n_directions);
        for (size_t j = 0; j < n_directions; ++j) {
            all[j] = deviation(&y[j], n_tokens, n_directions);
        }
        return all;
    }
};

double spread(const std::vector<double>& deviations) {
    const auto [least, most] = std::ranges::minmax(deviations);
    return most / least;
}

void multiply(std::span<double> gains, const std::vector<double>& deviations) {
    for (size_t i = 0; i < gains.size(); ++i) {
        gains[i] = std::clamp(gains[i] * deviations[i], kLeastGain, kMostGain);
    }
}

}  // namespace

void balance(std::span<const double> y, std::span<double> tokens, std::span<double> directions, BalanceFirst first) {
    Page page = {std::vector<double>(y.size()), tokens.size(), directions.size()};
    std::vector<double> t(tokens.size(), 1.0), d(directions.size(), 1.0);
    double least = std::numeric_limits<double>::infinity();
    for (int round = 0; round <= kRounds; ++round) {
        page.divide(y, t, d);
        const std::vector<double> rows = page.rows(), columns = page.columns();
        if (const double score = spread(columns) + spread(rows); score < least) {
            least = score;
            std::ranges::copy(t, tokens.begin());
            std::ranges::copy(d, directions.begin());
        }
        if (first == BalanceFirst::tokens) {
            multiply(t, rows);
            page.divide(y, t, d);
            multiply(d, page.columns());
        } else {
            multiply(d, columns);
            page.divide(y, t, d);
            multiply(t, page.rows());
        }
    }
}

}  // namespace crumb
