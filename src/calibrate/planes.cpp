// The bases of `planes`: whitened by the metric, decorrelated. What no formula gives is tried: a basis fitted on one fold
// of the text encodes sampled pages of the other, and the metric weighs what is lost.
#include <crumb/calibrate.h>
#include <crumb/error.h>
#include <crumb/recipe.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <mutex>
#include <thread>

#include "base/clones.h"
#include "calibrate/eigenbasis.h"
#include "calibrate/gram.h"
#include "recipe/planes.h"

namespace crumb {

namespace {

using Vector = std::vector<double>;

constexpr double kSpan = 1e-5;  // smallest eigenvalue of the metric, of its largest
// Page means cost 1/8 bit a channel; a bit is worth a factor of four in squared error.
constexpr double kPageMeanWorth = 1.1892071150027210;  // 2^(1/4)
constexpr double kPageMeanRoom = 1.5;                  // page means reach this much beyond those of the calibration
constexpr double kShrinks[] = {0.01, 0.03, 0.1, 0.3};
constexpr double kStepFactors[] = {0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5};

struct Choice {
    bool page_mean = false, centre = false;
    double shrink = kShrinks[0];
};

// c += a b, [d][d], row major.
CRUMB_CLONES void add_product(const double* __restrict a, const double* __restrict b, int d, double* __restrict c) {
    for (int i = 0; i < d; ++i) {
        for (int k = 0; k < d; ++k) {
            for (int j = 0; j < d; ++j) {
                c[i * d + j] += a[i * d + k] * b[k * d + j];
            }
        }
    }
}

Vector product(const Vector& a, const Vector& b, int d) {
    Vector c(size_t(d) * d);
    add_product(a.data(), b.data(), d, c.data());
    return c;
}

std::vector<float> narrow(const Vector& x) { return {x.begin(), x.end()}; }

// metric^(exponent / 2) of a positive matrix from its eigenbasis, eigenvalues kept within kSpan.
Vector power(const Eigenbasis& basis, double exponent, int d) {
    Vector scaled(basis.vectors), transposed(basis.vectors.size());
    for (int i = 0; i < d; ++i) {
        for (int j = 0; j < d; ++j) {
            const double value = std::max(basis.values[j], kSpan * basis.values[d - 1]);
            scaled[size_t(i) * d + j] *= std::pow(value, exponent / 2);
            transposed[size_t(j) * d + i] = basis.vectors[size_t(i) * d + j];
        }
    }
    return product(scaled, transposed, d);
}

// A metric as (1 - a) M + a I with the mean eigenvalue 1, and that eigenvalue apart. 0: nothing depends on this head.
struct Shrunk {
    Vector metric;
    double scale = 0;
};
Shrunk shrunk(const Vector& metric, double a, int d) {
    Shrunk result{Vector(size_t(d) * d), 0};
    for (int i = 0; i < d; ++i) {
        result.scale += metric[size_t(i) * d + i] / d;
    }
    for (int i = 0; i < d; ++i) {
        for (int j = 0; j < d && result.scale > 0; ++j) {
            result.metric[size_t(i) * d + j] = (1 - a) * metric[size_t(i) * d + j] / result.scale;
        }
        result.metric[size_t(i) * d + i] += result.scale > 0 ? a : 1.0;
    }
    return result;
}

// Basis of one head, with the steps of normal variables.
PlanesSide fit_head(const PageMoments& m, const Vector& metric, const Choice& choice) {
    const int d = int(m.mean.size());
    const Vector mean = choice.centre ? m.mean : Vector(d);
    Vector covariance = m.within, page_step;
    for (int i = 0; i < d; ++i) {
        if (choice.page_mean) {
            const double range = std::max(m.most[i] - mean[i], mean[i] - m.least[i]);
            page_step.push_back(std::max(kPageMeanRoom * range / 127, double(kStepFloor)));
            covariance[size_t(i) * d + i] += page_step[i] * page_step[i] / 12;  // what rounding leaves of a mean
        }
        for (int j = 0; j < d && !choice.page_mean; ++j) {
            covariance[size_t(i) * d + j] += m.between[size_t(i) * d + j] - mean[i] * (2 * m.mean[j] - mean[j]);
        }
    }

    const Shrunk weight = shrunk(metric, choice.shrink, d);
    const Eigenbasis of_metric = eigenbasis(weight.metric, d);
    const Vector root = power(of_metric, 1, d), inverse_root = power(of_metric, -1, d);
    const Eigenbasis basis = eigenbasis(product(product(root, covariance, d), root, d), d);
    Vector u(size_t(d) * d), u_transposed(size_t(d) * d), variance(d);
    double mean_variance = 0;
    for (int j = 0; j < d; ++j) {
        variance[j] = std::max(basis.values[d - 1 - j], 0.0);
        mean_variance += variance[j] / d;
        for (int i = 0; i < d; ++i) {
            u[size_t(i) * d + j] = u_transposed[size_t(j) * d + i] = basis.vectors[size_t(i) * d + d - 1 - j];
        }
    }
    const double unit = mean_variance > 0 ? std::sqrt(mean_variance) : 1.0;
    Vector encode = product(root, u, d), decode = product(u_transposed, inverse_root, d), spectrum(d), step(3 * size_t(d));
    for (size_t i = 0; i < encode.size(); ++i) {
        encode[i] /= unit;
        decode[i] *= unit;
    }
    for (int i = 0; i < d; ++i) {
        spectrum[i] = weight.scale * variance[i];
        for (int digits = 1; digits <= kMostDigits; ++digits) {
            const double gaussian = std::sqrt(variance[i]) / unit * kGaussian[digits].step;
            step[size_t(digits - 1) * d + i] = std::max(gaussian, double(kStepFloor));
        }
    }
    return {.encode = {1, d, narrow(encode)},
            .decode = {1, d, narrow(decode)},
            .spectrum = {1, d, narrow(spectrum)},
            .step = {1, d, narrow(step)},
            .mean = choice.centre ? Matrices{1, d, narrow(mean)} : Matrices{},
            .page_step = choice.page_mean ? Matrices{1, d, narrow(page_step)} : Matrices{}};
}

// The recipe at 2 bits a direction, at which bases are tried and steps are fitted.
const Recipe& recipe() {
    static const Recipe row = find_recipe("planes");
    return row;
}
SideFormat trial_format(const PlanesSide& side, const SideRecipe& row) {
    const int d = side.encode.dim;
    return {.dim = d, .planes = padded_planes(d, 1), .info = row.info, .mean = side.page_step.present()};
}

// Rows of a page in the basis of a head, mean and page mean removed: [64][d].
Vector mapped(const SideTables& tables, std::span<const bf16> rows) {
    const int d = tables.format.dim;
    Vector x(rows.size()), y(rows.size());
    for (int i = 0; i < d; ++i) {
        double sum = 0;
        for (int t = 0; t < kPageTokens; ++t) {
            double& value = x[size_t(t) * d + i];
            value = to_float(rows[size_t(t) * d + i]) - (tables.mean.empty() ? 0.0 : double(tables.mean[i]));
            sum += value;
        }
        if (!tables.format.mean) {
            continue;
        }
        const double step = tables.mean_step[i];
        const double m = step * std::floor(std::clamp(sum / kPageTokens / step, -127.0, 127.0) + 0.5);
        for (int t = 0; t < kPageTokens; ++t) {
            x[size_t(t) * d + i] -= m;
        }
    }
    for (int t = 0; t < kPageTokens; ++t) {
        for (int i = 0; i < d; ++i) {
            const double value = x[size_t(t) * d + i];
            for (int j = 0; j < d; ++j) {
                y[size_t(t) * d + j] += value * tables.encode[size_t(i) * d + j];
            }
        }
    }
    return y;
}

// Adds what n directions of a token lose in codes of so many levels with these steps times its gain.
CRUMB_CLONES void add_misses(const double* __restrict y, const double* __restrict steps, double gain, int n, double levels,
                             double* __restrict errors) {
    for (int i = 0; i < n; ++i) {
        const double step = steps[i] * gain;
        const double code = std::min(std::max(std::floor(y[i] / step + levels / 2), 0.0), levels - 1);
        const double miss = y[i] - (code - (levels - 1) / 2) * step;
        errors[i] += miss * miss;
    }
}

// Steps of each width that lose least of the sample, gains as the rms of what is coded at 2 bits a direction.
void fit_steps(PlanesSide& side, const SideRecipe& row, std::span<const SamplePage> sample,
               std::vector<bf16> SamplePage::*rows) {
    const SideTables tables = planes_tables(side, 0, trial_format(side, row));
    const int d = tables.format.dim;
    constexpr size_t kFactors = std::size(kStepFactors);
    const size_t widths = kMostDigits * size_t(d);
    std::vector<double> steps, errors(kFactors * widths);  // by factor, digits, direction
    for (const double factor : kStepFactors) {
        for (const float step : side.step.data) {
            steps.push_back(step * factor);
        }
    }
    for (const SamplePage& page : sample) {
        const Vector y = mapped(tables, page.*rows);
        for (int t = 0; t < kPageTokens; ++t) {
            const double* row = y.data() + size_t(t) * d;
            double energy = 0;
            int live = 0;
            for (int i = 0; i < d; ++i) {
                const double normal = row[i] / tables.sigma[i];
                energy += tables.digits[i] > 0 ? normal * normal : 0.0;
                live += tables.digits[i] > 0;
            }
            const double gain = std::max(std::sqrt(energy / std::max(live, 1)), 1e-6);
            for (size_t f = 0; f < kFactors; ++f) {
                for (int digits = 1; digits <= kMostDigits; ++digits) {
                    const size_t at = f * widths + size_t(digits - 1) * d;
                    add_misses(row, &steps[at], gain, d, double(1 << 2 * digits), &errors[at]);
                }
            }
        }
    }
    for (size_t e = 0; e < widths && !sample.empty(); ++e) {
        size_t least = 0;
        for (size_t f = 1; f < kFactors; ++f) {
            least = errors[f * widths + e] < errors[least * widths + e] ? f : least;
        }
        side.step.data[e] = std::max(float(side.step.data[e] * kStepFactors[least]), kStepFloor);
    }
}

// What the metric makes of the errors of decoded rows.
double loss(std::span<const bf16> rows, std::span<const float> decoded, const Vector& metric, int d) {
    Vector error(rows.size()), losses(kPageTokens);
    for (size_t i = 0; i < rows.size(); ++i) {
        error[i] = double(decoded[i]) - to_float(rows[i]);
    }
    quadratic_forms(error.data(), kPageTokens, d, metric.data(), losses.data());
    double sum = 0;
    for (const double x : losses) {
        sum += x;
    }
    return sum;
}

struct Losses {
    double k = 0, v = 0;
};

// Everything that is known of one layer. Metrics by part: what is fitted on part p is weighed by part 1 - p.
class LayerFit {
  public:
    LayerFit(const Moments& moments, int layer, std::span<const Metric> metrics) : shape_(moments.shape(layer)) {
        for (int h = 0; h < shape_.n_head_kv; ++h) {
            heads_.push_back(&moments.pages(layer, h));
            if (heads_[h]->key_moments(-1).pages == 0) {
                fail("layer {} has seen no whole page of {} tokens: give longer texts or windows", layer, kPageTokens);
            }
        }
        several_metrics_ = metrics.size() > 1;
        for (int part = 0; part < 2; ++part) {
            parts_[part] = metrics.empty() ? relative() : mean(metrics, layer, several_metrics_ ? part : -1);
        }
        whole_ = metrics.empty() ? parts_[0] : mean(metrics, layer, -1);
    }

    void run(LayerArtefact& artefact) const {
        Choice k, v;
        const auto weighed = [](double loss, const Choice& c) { return loss * (c.page_mean ? kPageMeanWorth : 1.0); };
        double least_k = INFINITY, least_v = INFINITY;
        const auto try_out = [&](Choice try_k, Choice try_v, bool new_v = true) {
            const Losses losses = tried(try_k, try_v, new_v);
            if (weighed(losses.k, try_k) < least_k) {
                least_k = weighed(losses.k, try_k);
                k = try_k;
            }
            if (weighed(losses.v, try_v) < least_v) {
                least_v = weighed(losses.v, try_v);
                v = try_v;
            }
        };
        // V is never centred: tokens with a tiny V matter and would become minus the mean.
        for (const bool page_mean : {false, true}) {
            for (const bool centre : {false, true}) {
                try_out({.page_mean = page_mean, .centre = centre}, {.page_mean = page_mean}, !centre);
            }
        }
        const Choice best_k = k, best_v = v;
        for (size_t i = 1; i < std::size(kShrinks) && several_metrics_; ++i) {
            try_out({best_k.page_mean, best_k.centre, kShrinks[i]}, {best_v.page_mean, false, kShrinks[i]});
        }
        for (int h = 0; h < shape_.n_head_kv; ++h) {
            const auto append_head = [&](PlanesSide& to, const PageMoments& m, const Vector& metric, const Choice& choice,
                                         const SideRecipe& row, std::vector<bf16> SamplePage::*rows) {
                PlanesSide head = fit_head(m, metric, choice);
                fit_steps(head, row, heads_[h]->sample(), rows);
                append(to, head);
            };
            append_head(artefact.k_planes, heads_[h]->key_moments(-1), whole_[h].k, k, recipe().k, &SamplePage::k);
            append_head(artefact.v_planes, heads_[h]->value_moments(-1), whole_[h].v, v, recipe().v, &SamplePage::v);
        }
    }

  private:
    // No metric: squared errors relative to the variance of K or V in this layer.
    std::vector<HeadMetric> relative() const {
        double energy[2] = {};
        for (const PageSums* pages : heads_) {
            const PageMoments sides[] = {pages->key_moments(-1), pages->value_moments(-1)};
            for (int s = 0; s < 2; ++s) {
                const PageMoments& m = sides[s];
                for (size_t i = 0, d = m.mean.size(); i < d; ++i) {
                    energy[s] += (m.within[i * d + i] + m.between[i * d + i] - m.mean[i] * m.mean[i]) / double(d);
                }
            }
        }
        const auto identity = [&](int d, double e) {
            Vector metric(size_t(d) * d);
            for (int i = 0; i < d; ++i) {
                metric[size_t(i) * d + i] = e > 0 ? shape_.n_head_kv / e : 0.0;
            }
            return metric;
        };
        return std::vector(shape_.n_head_kv,
                           HeadMetric{identity(shape_.dim_k, energy[0]), identity(shape_.dim_v, energy[1])});
    }

    // Of every second metric, from the part-th on, or of all (part < 0).
    std::vector<HeadMetric> mean(std::span<const Metric> metrics, int index, int part) const {
        const size_t kk = size_t(shape_.dim_k) * shape_.dim_k, vv = size_t(shape_.dim_v) * shape_.dim_v;
        std::vector<HeadMetric> sum(shape_.n_head_kv, {Vector(kk), Vector(vv)});
        double tokens = 0;
        for (size_t i = 0; i < metrics.size(); ++i) {
            const auto found = metrics[i].find(index);
            tokens += found != metrics[i].end() && (part < 0 || int(i % 2) == part) ? double(found->second.tokens) : 0.0;
        }
        for (size_t i = 0; i < metrics.size(); ++i) {
            const auto found = metrics[i].find(index);
            if (found == metrics[i].end() || int(found->second.heads.size()) != shape_.n_head_kv || tokens == 0) {
                fail("the metric of layer {} has {} KV heads, the model {}: measure it again", index,
                     found == metrics[i].end() ? 0 : found->second.heads.size(), shape_.n_head_kv);
            }
            for (int h = 0; h < shape_.n_head_kv && (part < 0 || int(i % 2) == part); ++h) {
                const HeadMetric& head = found->second.heads[h];
                for (const auto& [to, from] : {std::pair{&sum[h].k, &head.k}, std::pair{&sum[h].v, &head.v}}) {
                    if (to->size() != from->size()) {
                        fail("the metric of layer {} has {} values a head, the model needs {}: measure it again", index,
                             from->size(), to->size());
                    }
                    for (size_t e = 0; e < to->size(); ++e) {
                        (*to)[e] += (*from)[e] * double(found->second.tokens) / tokens;
                    }
                }
            }
        }
        return sum;
    }

    // Without weigh_v only K is weighed: that V has been seen.
    Losses tried(const Choice& k, const Choice& v, bool weigh_v) const {
        Losses sum = {0, weigh_v ? 0.0 : INFINITY};
        for (int h = 0; h < shape_.n_head_kv; ++h) {
            const PageSums& pages = *heads_[h];
            const bool apart = pages.key_moments(0).pages > 0 && pages.key_moments(1).pages > 0;
            for (int part = 0; part < 2; ++part) {
                const int fold = apart ? part : -1;
                const PlanesSide k_side = fit_head(pages.key_moments(fold), parts_[part][h].k, k);
                const PlanesSide v_side = fit_head(pages.value_moments(fold), parts_[part][h].v, v);
                const PageFormat format{trial_format(k_side, recipe().k), trial_format(v_side, recipe().v)};
                const HeadTables tables{planes_tables(k_side, 0, format.k), planes_tables(v_side, 0, format.v)};
                std::vector<std::byte> page(format.bytes());
                for (const SamplePage& sample : pages.sample()) {
                    if (apart && sample.fold == part) {
                        continue;
                    }
                    encode_page(recipe(), format, tables, sample.k, sample.v, page.data());
                    std::vector<float> k_rows(sample.k.size());
                    decode_keys(format, tables.k, page.data(), k_rows);
                    sum.k += loss(sample.k, k_rows, parts_[1 - part][h].k, shape_.dim_k);
                    if (!weigh_v) {
                        continue;
                    }
                    std::vector<float> v_rows(sample.v.size());
                    decode_values(format, tables.v, page.data(), v_rows);
                    sum.v += loss(sample.v, v_rows, parts_[1 - part][h].v, shape_.dim_v);
                }
            }
        }
        return sum;
    }

    static void append(PlanesSide& to, const PlanesSide& head) {
        for (const auto part : {&PlanesSide::encode, &PlanesSide::decode, &PlanesSide::spectrum, &PlanesSide::step,
                                &PlanesSide::mean, &PlanesSide::page_step}) {
            Matrices& m = to.*part;
            m.heads += (head.*part).heads;
            m.dim = (head.*part).dim;
            m.data.insert(m.data.end(), (head.*part).data.begin(), (head.*part).data.end());
        }
    }

    LayerShape shape_;
    std::vector<const PageSums*> heads_;
    bool several_metrics_ = false;
    std::vector<HeadMetric> parts_[2], whole_;
};

}  // namespace

void add_planes(Artefact& artefact, const Moments& moments, std::span<const int> layers, std::span<const Metric> metrics,
                int n_threads) {
    std::vector<LayerArtefact*> results;
    for (const int layer : layers) {
        results.push_back(&artefact.layers[layer]);
    }
    std::exception_ptr error;
    std::mutex mutex;
    const auto work = [&](int thread) {
        try {
            for (size_t i = thread; i < layers.size(); i += n_threads) {
                results[i]->k_planes = results[i]->v_planes = {};
                LayerFit(moments, layers[i], metrics).run(*results[i]);
            }
        } catch (...) {
            const std::lock_guard lock(mutex);
            error = std::current_exception();
        }
    };
    {
        std::vector<std::jthread> others;
        for (int thread = 1; thread < n_threads; ++thread) {
            others.emplace_back(work, thread);
        }
        work(0);
    }
    if (error) {
        std::rethrow_exception(error);
    }
}

}  // namespace crumb
