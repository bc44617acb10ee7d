#include "recipe/planes.h"

#include <crumb/error.h>

#include <algorithm>
#include <cmath>
#include <optional>

namespace crumb {

namespace {

// What the next digit of a direction takes off the expected error, for variance 1.
double gain_of_digit(int digits) { return kGaussian[digits].error - kGaussian[digits + 1].error; }

// Gains of a head's planes in the order in which they are given out, which is descending.
std::vector<double> gains_of_planes(std::span<const float> spectrum) {
    std::vector<double> gains;
    for (const float variance : spectrum) {
        for (int digits = 0; digits < kMostDigits; ++digits) {
            gains.push_back(double(variance) * gain_of_digit(digits));
        }
    }
    std::ranges::sort(gains, std::greater<>());
    return gains;
}

// K or V of one layer: what each further step of planes brings, and where it stands.
struct Side {
    SideFormat* format;
    int n_head_kv;
    std::vector<double> gain;  // by step, mean of the heads

    std::optional<double> next() const {
        const size_t step = size_t(format->planes / kPlaneStep);
        return step < gain.size() ? std::optional(gain[step]) : std::nullopt;
    }
};

Side side_of(const PlanesSide& basis, int n_head_kv, SideInfo info, SideFormat& format) {
    const int dim = basis.encode.dim;
    format = {.dim = dim, .planes = kPlaneStep, .info = info, .mean = basis.page_step.present()};
    Side side{&format, n_head_kv, std::vector<double>(size_t(kMostDigits * dim / kPlaneStep))};
    for (int head = 0; head < n_head_kv; ++head) {
        const std::vector<double> gains = gains_of_planes(basis.spectrum.head(head));
        for (size_t plane = 0; plane < side.gain.size() * kPlaneStep; ++plane) {
            side.gain[plane / kPlaneStep] += gains[plane] / n_head_kv;
        }
    }
    return side;
}

}  // namespace

std::vector<uint8_t> assign_digits(std::span<const float> spectrum, int planes) {
    CRUMB_ASSERT(planes <= kMostDigits * int(spectrum.size()));
    std::vector<uint8_t> digits(spectrum.size());
    for (int plane = 0; plane < planes; ++plane) {
        size_t best = 0;
        double most = -1;
        for (size_t i = 0; i < spectrum.size(); ++i) {
            if (digits[i] < kMostDigits && double(spectrum[i]) * gain_of_digit(digits[i]) > most) {
                most = double(spectrum[i]) * gain_of_digit(digits[i]);
                best = i;
            }
        }
        ++digits[best];
    }
    return digits;
}

std::vector<PageFormat> planes_formats(std::span<const PlanesLayer> layers, const Recipe& recipe) {
    std::vector<PageFormat> formats(layers.size());
    std::vector<Side> sides;
    const SideInfo info = (recipe.k.map == Map::planes ? recipe.k : recipe.v).info;
    double elements = 0, bits = 0;
    for (size_t i = 0; i < layers.size(); ++i) {
        const auto& [n_head_kv, k, v] = layers[i];
        sides.push_back(side_of(*k, n_head_kv, info, formats[i].k));
        sides.push_back(side_of(*v, n_head_kv, info, formats[i].v));
        check(formats[i]);
        bits += 8.0 * double(n_head_kv) * double(formats[i].bytes());
        elements += double(kPageTokens) * n_head_kv * (formats[i].k.dim + formats[i].v.dim);
    }
    if (bits > recipe.rate * elements) {
        fail("{} bits an element are not enough for this model: {} planes a side and its side information take {:.3f}; "
             "type --kv {}:{:.2f} or more",
             recipe.rate, kPlaneStep, bits / elements, recipe.name, std::ceil(100 * bits / elements) / 100);
    }
    for (;;) {
        Side* best = nullptr;
        double most = 0;
        for (Side& side : sides) {
            const double cost = 2.0 * kPlaneStep * kPageTokens * side.n_head_kv;
            const auto gain = side.next();
            if (gain && bits + cost <= recipe.rate * elements && (!best || *gain > most)) {
                best = &side;
                most = *gain;
            }
        }
        if (!best) {
            return formats;
        }
        best->format->planes += kPlaneStep;
        bits += 2.0 * kPlaneStep * kPageTokens * best->n_head_kv;
    }
}

SideTables planes_tables(const PlanesSide& side, int head, const SideFormat& format) {
    const size_t dim = size_t(format.dim);
    const std::span<const float> spectrum = side.spectrum.head(head), steps = side.step.head(head);
    const auto optional = [&](const Matrices& m) {
        return m.present() ? std::vector<float>(m.head(head).begin(), m.head(head).end()) : std::vector<float>();
    };
    SideTables tables;
    tables.format = format;
    tables.mean = optional(side.mean);
    tables.mean_step = optional(side.page_step);
    tables.encode = optional(side.encode);
    tables.digits = assign_digits(spectrum, format.planes);
    double mean = 0;
    for (const float variance : spectrum) {
        mean += double(variance) / double(dim);
    }
    for (size_t i = 0; i < dim; ++i) {
        const double sigma = mean > 0 ? std::sqrt(double(spectrum[i]) / mean) : 1.0;
        tables.sigma.push_back(std::max(float(sigma), kStepFloor));
        tables.step.push_back(tables.digits[i] == 0 ? 1.0f : steps[(tables.digits[i] - 1) * dim + i]);
    }
    const std::span<const float> decode = side.decode.head(head);
    finish_tables(tables, std::vector<double>(decode.begin(), decode.end()));
    return tables;
}

}  // namespace crumb
