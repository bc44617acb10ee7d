// The local metric against its definition in double precision, pair by pair.
#include <crumb/local_metric.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace crumb {
namespace {

struct Sequence {
    int n = 0;
    std::vector<float> q, k, v, o;  // [n][heads][d]
};

struct World {
    LayerShape shape;
    int n_out = 40, sink = 10, recent = 30;
    float scale = 0.3f;
    std::vector<float> projection;
    std::vector<Sequence> sequences;
};

// `sharp`: queries that attend to almost nothing but one key; `offset`: keys with a common part; `zero`: no values.
World make(LayerShape shape, std::vector<int> lengths, unsigned seed, float sharp = 1, float offset = 0, bool zero = false) {
    World w;
    w.shape = shape;
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](size_t n, float size, float mean) {
        std::vector<float> x(n);
        for (float& y : x) { y = mean + size * normal(random); }
        return x;
    };
    w.projection = fill(size_t(w.n_out) * shape.n_head * shape.dim_v, 0.5f, 0);
    for (const int n : lengths) {
        Sequence s;
        s.n = n;
        s.q = fill(size_t(n) * shape.n_head * shape.dim_k, sharp, 0);
        s.k = fill(size_t(n) * shape.n_head_kv * shape.dim_k, 1, offset);
        s.v = fill(size_t(n) * shape.n_head_kv * shape.dim_v, zero ? 0 : 1, 0);
        s.o.resize(size_t(n) * shape.n_head * shape.dim_v);
        w.sequences.push_back(std::move(s));
    }
    return w;
}

std::vector<double> probabilities(const World& w, const Sequence& s, int h, int t) {
    const int dk = w.shape.dim_k, kv = h / (w.shape.n_head / w.shape.n_head_kv);
    std::vector<double> p(t + 1);
    double top = -INFINITY, sum = 0;
    for (int j = 0; j <= t; ++j) {
        for (int i = 0; i < dk; ++i) {
            p[j] += double(s.q[(size_t(t) * w.shape.n_head + h) * dk + i]) * s.k[(size_t(j) * w.shape.n_head_kv + kv) * dk + i];
        }
        top = std::max(top, p[j] *= w.scale);
    }
    for (double& x : p) { sum += x = std::exp(x - top); }
    for (double& x : p) { x /= sum; }
    return p;
}

// Also fills in the outputs of attention.
LayerMetric reference(World& w) {
    const LayerShape& shape = w.shape;
    const int dk = shape.dim_k, dv = shape.dim_v, group = shape.n_head / shape.n_head_kv;
    LayerMetric m;
    m.heads.assign(shape.n_head_kv, {std::vector<double>(dk * dk), std::vector<double>(dv * dv)});
    for (const Sequence& s : w.sequences) { m.tokens += uint64_t(std::max(0, s.n - w.sink - w.recent)); }
    for (Sequence& s : w.sequences) {
        for (int h = 0; h < shape.n_head; ++h) {
            HeadMetric& out = m.heads[h / group];
            for (int t = 0; t < s.n; ++t) {
                const auto p = probabilities(w, s, h, t);
                const float* q = &s.q[(size_t(t) * shape.n_head + h) * dk];
                const auto v = [&](int j, int i) { return double(s.v[(size_t(j) * shape.n_head_kv + h / group) * dv + i]); };
                std::vector<double> o(dv);
                for (int j = 0; j <= t; ++j) {
                    for (int i = 0; i < dv; ++i) { o[i] += p[j] * v(j, i); }
                }
                std::copy(o.begin(), o.end(), &s.o[(size_t(t) * shape.n_head + h) * dv]);
                for (int j = w.sink; j <= t - w.recent; ++j) {
                    double apart = 0;
                    for (int e = 0; e < w.n_out; ++e) {
                        const float* row = &w.projection[(size_t(e) * shape.n_head + h) * dv];
                        double y = 0;
                        for (int i = 0; i < dv; ++i) { y += row[i] * (v(j, i) - o[i]); }
                        apart += y * y;
                        for (int a = 0; a < dv; ++a) {
                            for (int b = 0; b < dv; ++b) { out.v[a * dv + b] += p[j] * p[j] * row[a] * row[b] / double(m.tokens); }
                        }
                    }
                    for (int a = 0; a < dk; ++a) {
                        for (int b = 0; b < dk; ++b) {
                            out.k[a * dk + b] += p[j] * p[j] * apart * w.scale * w.scale * q[a] * q[b] / double(m.tokens);
                        }
                    }
                }
            }
        }
    }
    return m;
}

std::vector<Metric> measured_parts(const World& w, int step, int n_threads, int n_folds) {
    LocalMetric local(w.sink, w.recent, n_threads);
    local.set_projection(3, w.shape, w.projection);
    EXPECT_TRUE(local.measures(3));
    EXPECT_FALSE(local.measures(2));
    const LayerShape& s = w.shape;
    int index = 0;
    for (const Sequence& sequence : w.sequences) {
        local.begin_sequence(index++ % n_folds);
        for (int at = 0; at < sequence.n; at += step) {
            const auto rows = [&](const std::vector<float>& x, int heads, int d) {
                return HeadRows{x.data() + size_t(at) * heads * d, size_t(heads) * d, size_t(d)};
            };
            local.observe(3, s, w.scale,
                          {.n_tokens = std::min(step, sequence.n - at),
                           .q = rows(sequence.q, s.n_head, s.dim_k),
                           .k = rows(sequence.k, s.n_head_kv, s.dim_k),
                           .v = rows(sequence.v, s.n_head_kv, s.dim_v),
                           .output = rows(sequence.o, s.n_head, s.dim_v)});
        }
    }
    return local.metrics();
}

Metric measured(const World& w, int step, int n_threads) { return measured_parts(w, step, n_threads, 1).at(0); }

// Scores are sums of floats, and a probability's relative error is the absolute one of its score.
constexpr double kTolerance = 2e-5;

void expect_near(const std::vector<double>& found, const std::vector<double>& expected) {
    ASSERT_EQ(found.size(), expected.size());
    double size = 0;
    for (const double x : expected) { size = std::max(size, std::abs(x)); }
    for (size_t i = 0; i < found.size(); ++i) { EXPECT_NEAR(found[i], expected[i], kTolerance * size) << i; }
}

void expect_definition(World w) {
    const LayerMetric expected = reference(w);
    const Metric found = measured(w, 1000, 1);
    ASSERT_EQ(found.size(), 1u);
    EXPECT_EQ(found.at(3).tokens, expected.tokens);
    for (size_t h = 0; h < expected.heads.size(); ++h) {
        expect_near(found.at(3).heads[h].k, expected.heads[h].k);
        expect_near(found.at(3).heads[h].v, expected.heads[h].v);
    }
}

TEST(LocalMetric, IsItsDefinition) {
    expect_definition(make({4, 2, 16, 16}, {131, 20, 67}, 1));
    expect_definition(make({3, 1, 24, 8}, {90}, 2));      // other sizes for K and V
    expect_definition(make({2, 2, 64, 64}, {41, 42}, 3));  // one and two queries with far rows
    expect_definition(make({4, 2, 16, 16}, {131}, 4, 20));
    expect_definition(make({4, 2, 16, 16}, {131}, 5, 1, 8));
    expect_definition(make({4, 2, 16, 16}, {131}, 6, 1, 0, true));
}

TEST(LocalMetric, StepsAndThreadsChangeNoBit) {
    World w = make({4, 2, 16, 16}, {131, 100}, 7);
    reference(w);
    const Metric one = measured(w, 1000, 1);
    EXPECT_EQ(measured(w, 1000, 3), one);
    for (const int step : {1, 2, 33, 64}) {
        EXPECT_EQ(measured(w, step, 2), one) << step;
    }
}

TEST(LocalMetric, PartsOfTheTextAddUp) {
    World w = make({4, 2, 16, 16}, {131, 90, 64}, 11);
    reference(w);
    const Metric whole = measured(w, 50, 1);
    const auto parts = measured_parts(w, 50, 1, 2);
    ASSERT_EQ(parts.size(), 2u);
    const auto& [a, b] = std::pair{parts[0].at(3), parts[1].at(3)};
    EXPECT_EQ(a.tokens + b.tokens, whole.at(3).tokens);
    const double na = double(a.tokens), nb = double(b.tokens);
    for (size_t h = 0; h < 2; ++h) {
        for (const auto side : {&HeadMetric::k, &HeadMetric::v}) {
            std::vector<double> mean = a.heads[h].*side;
            for (size_t i = 0; i < mean.size(); ++i) { mean[i] = (na * mean[i] + nb * (b.heads[h].*side)[i]) / (na + nb); }
            expect_near(mean, whole.at(3).heads[h].*side);
        }
    }
}

TEST(LocalMetric, ComparesShapesOfMetrics) {
    World w = make({4, 2, 16, 16}, {131}, 8), other = make({4, 2, 16, 16}, {131}, 9);
    reference(w);
    reference(other);
    const Metric a = measured(w, 1000, 1), b = measured(other, 1000, 1);
    Metric scaled = a;
    for (auto& head : scaled.at(3).heads) {
        for (double& x : head.k) { x *= 5; }
    }
    EXPECT_LT(disagreement(a, scaled).k, 1e-12);
    EXPECT_GT(disagreement(a, b).k, 0.05);
    EXPECT_GT(disagreement(a, b).v, 0.05);
}

TEST(LocalMetric, RefusesTooShortSequences) {
    World w = make({4, 2, 16, 16}, {40}, 10);
    reference(w);
    try {
        measured(w, 1000, 1);
        ADD_FAILURE();
    } catch (const std::exception& e) {
        EXPECT_NE(std::string(e.what()).find("no token with 10 + 30 before it in layers 3"), std::string::npos) << e.what();
    }
}

}  // namespace
}  // namespace crumb
