// Moments against the batch definitions written out in double precision, and rotations against small oracles.
#include <crumb/calibrate.h>
#include <crumb/error.h>
#include <crumb/recipe.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>

#include "calibrate/gram.h"
#include "files.h"

namespace crumb {
namespace {

using Vector = std::vector<double>;

// One layer's activations, [token][head][channel], with channels of unequal size and a mean in K.
struct Activations {
    LayerShape shape;
    int n = 0;
    std::vector<float> q, k, v, output;

    Activations(LayerShape shape, int n, unsigned seed) : shape(shape), n(n) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        const auto fill = [&](std::vector<float>& x, int heads, int d, float mean) {
            x.resize(size_t(n) * heads * d);
            for (size_t i = 0; i < x.size(); ++i) {
                x[i] = normal(random) * (1 + float(i % d) / 4) + mean;
            }
        };
        fill(q, shape.n_head, shape.dim_k, 0.5f);
        fill(k, shape.n_head_kv, shape.dim_k, 1.0f);
        fill(v, shape.n_head_kv, shape.dim_v, 0.0f);
        fill(output, shape.n_head, shape.dim_v, 0.2f);
    }

    TokenBlock block(int first, int count) const {
        const auto rows = [&](const std::vector<float>& x, int heads, int d) {
            return HeadRows{x.data() + size_t(first) * heads * d, size_t(heads) * d, size_t(d)};
        };
        return {count, rows(q, shape.n_head, shape.dim_k), rows(k, shape.n_head_kv, shape.dim_k),
                rows(v, shape.n_head_kv, shape.dim_v), rows(output, shape.n_head, shape.dim_v)};
    }

    Vector row(const std::vector<float>& x, int heads, int d, int t, int h) const {
        const float* p = x.data() + (size_t(t) * heads + h) * d;
        return Vector(p, p + d);
    }
};

void add_outer(Vector& c, const Vector& x, double weight) {
    const size_t d = x.size();
    for (size_t i = 0; i < d; ++i) {
        for (size_t j = 0; j < d; ++j) {
            c[i * d + j] += weight * x[i] * x[j];
        }
    }
}

// The definitions of docs/design/artefact.md, with all tokens at hand.
HeadMoments batch(const Activations& a, int kv_head, int skip) {
    const auto& s = a.shape;
    const int group = s.n_head / s.n_head_kv, dk = s.dim_k, dv = s.dim_v;
    const double n = a.n - skip;
    HeadMoments m{Vector(dk), Vector(dk * dk), Vector(dk * dk), Vector(dv * dv), Vector(dv * dv), Vector(dv * dv)};
    for (int t = skip; t < a.n; ++t) {
        const auto k = a.row(a.k, s.n_head_kv, dk, t, kv_head);
        for (int i = 0; i < dk; ++i) {
            m.key_mean[i] += k[i] / n;
        }
        add_outer(m.kk, k, 1 / n);
        add_outer(m.vv, a.row(a.v, s.n_head_kv, dv, t, kv_head), 1 / n);
        for (int g = 0; g < group; ++g) {
            add_outer(m.qq, a.row(a.q, s.n_head, dk, t, kv_head * group + g), 1 / (n * group));
            add_outer(m.sst_true, a.row(a.output, s.n_head, dv, t, kv_head * group + g), 1 / (n * group));
        }
    }
    Vector weights;
    double sum = 0;
    for (int t = skip; t < a.n; ++t) {
        const auto k = a.row(a.k, s.n_head_kv, dk, t, kv_head);
        double w = 0;
        for (int i = 0; i < dk; ++i) {
            for (int j = 0; j < dk; ++j) {
                w += k[i] * m.qq[i * dk + j] * k[j];
            }
        }
        weights.push_back(w);
        sum += w;
    }
    for (int t = skip; t < a.n; ++t) {
        add_outer(m.sst, a.row(a.v, s.n_head_kv, dv, t, kv_head), weights[t - skip] * n / sum / n);
    }
    return m;
}

double norm(const Vector& x) { return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0)); }

double relative_distance(const Vector& x, const Vector& y) {
    Vector difference(x.size());
    std::transform(x.begin(), x.end(), y.begin(), difference.begin(), std::minus<>());
    return norm(difference) / norm(y);
}

void observe_in_blocks(Moments& moments, int layer, const Activations& a, int block) {
    for (int t = 0; t < a.n; t += block) {
        moments.observe(layer, a.shape, a.block(t, std::min(block, a.n - t)));
    }
}

TEST(Moments, AreThoseOfTheBatchDefinition) {
    for (const LayerShape shape : {LayerShape{6, 2, 16, 16}, LayerShape{4, 4, 12, 20}, LayerShape{3, 1, 7, 5}}) {
        const Activations a(shape, 400, 1);
        Moments moments(64);
        moments.begin_sequence();
        observe_in_blocks(moments, 5, a, 100);
        EXPECT_EQ(moments.tokens(5), 336u);
        for (int h = 0; h < shape.n_head_kv; ++h) {
            const HeadMoments ours = moments.head(5, h), expected = batch(a, h, 64);
            EXPECT_LT(relative_distance(ours.key_mean, expected.key_mean), 1e-13);
            EXPECT_LT(relative_distance(ours.qq, expected.qq), 1e-13);
            EXPECT_LT(relative_distance(ours.kk, expected.kk), 1e-13);
            EXPECT_LT(relative_distance(ours.vv, expected.vv), 1e-13);
            EXPECT_LT(relative_distance(ours.sst_true, expected.sst_true), 1e-13);
        }
    }
}

// The surrogate's weights use the queries seen so far: exact for one block, or after a first reading.
TEST(Moments, SurrogateAgreesWithTheBatchDefinition) {
    const Activations a({6, 2, 16, 16}, 4096, 2);
    Moments one(0), many(0), twice(0);
    observe_in_blocks(one, 0, a, a.n);
    observe_in_blocks(many, 0, a, 256);
    observe_in_blocks(twice, 0, a, 256);
    twice.fix_weights();
    EXPECT_EQ(twice.tokens(0), 0u);
    observe_in_blocks(twice, 0, a, 100);
    for (int h = 0; h < 2; ++h) {
        const HeadMoments expected = batch(a, h, 0);
        EXPECT_LT(relative_distance(one.head(0, h).sst, expected.sst), 1e-12);
        EXPECT_LT(relative_distance(twice.head(0, h).sst, expected.sst), 1e-12);
        EXPECT_LT(relative_distance(many.head(0, h).sst, expected.sst), 5e-3);
        EXPECT_LT(relative_distance(twice.head(0, h).qq, expected.qq), 1e-12);
    }
}

TEST(Moments, DoNotDependOnThreads) {
    const Activations a({8, 4, 16, 16}, 300, 3);
    Moments one(10, 1), many(10, 3);
    observe_in_blocks(one, 0, a, 77);
    observe_in_blocks(many, 0, a, 77);
    for (int h = 0; h < 4; ++h) {
        EXPECT_EQ(one.head(0, h).sst, many.head(0, h).sst);
        EXPECT_EQ(one.head(0, h).qq, many.head(0, h).qq);
    }
}

TEST(Moments, HonourStrides) {
    const Activations a({4, 2, 16, 16}, 50, 4);
    // The same rows as [head][token][channel].
    const auto transposed = [&](const std::vector<float>& x, int heads, int d) {
        std::vector<float> y(x.size());
        for (int t = 0; t < a.n; ++t) {
            for (int h = 0; h < heads; ++h) {
                std::copy_n(x.begin() + (size_t(t) * heads + h) * d, d, y.begin() + (size_t(h) * a.n + t) * d);
            }
        }
        return y;
    };
    const auto q = transposed(a.q, 4, 16), k = transposed(a.k, 2, 16), v = transposed(a.v, 2, 16),
               o = transposed(a.output, 4, 16);
    const size_t head = size_t(a.n) * 16;
    Moments plain(7), strided(7);
    plain.observe(0, a.shape, a.block(0, a.n));
    strided.observe(0, a.shape,
                    {a.n, {q.data(), 16, head}, {k.data(), 16, head}, {v.data(), 16, head}, {o.data(), 16, head}});
    for (int h = 0; h < 2; ++h) {
        EXPECT_EQ(plain.head(0, h).key_mean, strided.head(0, h).key_mean);
        EXPECT_EQ(plain.head(0, h).sst, strided.head(0, h).sst);
        EXPECT_EQ(plain.head(0, h).sst_true, strided.head(0, h).sst_true);
    }
}

TEST(Moments, SkipTheFirstTokensOfEachSequence) {
    const Activations a({2, 1, 8, 8}, 100, 5);
    Moments moments(64);
    for (int sequence = 0; sequence < 3; ++sequence) {
        moments.begin_sequence();
        observe_in_blocks(moments, 0, a, 30);
    }
    EXPECT_EQ(moments.tokens(0), 3u * 36);
    EXPECT_LT(relative_distance(moments.head(0, 0).kk, batch(a, 0, 64).kk), 1e-13);
}

TEST(Moments, SayWhatIsMissing) {
    const Activations a({2, 1, 8, 8}, 100, 6);
    Moments moments(64);
    observe_in_blocks(moments, 0, a, 100);
    observe_in_blocks(moments, 1, a, 100);
    observe_in_blocks(moments, 1, a, 100);
    moments.observe(3, a.shape, a.block(0, 20));  // all of it skipped
    const int all[] = {0, 1, 2, 3}, two[] = {0, 1}, one[] = {1};
    EXPECT_EQ(error_of([&] { moments.require(all); }), "calibration saw no tokens in layers 2 3 (of 4 layers)");
    EXPECT_EQ(error_of([&] { moments.require(two); }),
              "calibration saw different numbers of tokens in its layers (layer: tokens) 0: 36 1: 136");
    moments.require(one);
    const Activations other({4, 1, 8, 8}, 100, 6);
    EXPECT_NE(error_of([&] { observe_in_blocks(moments, 0, other, 100); }).find("4 query and 1 KV heads"),
              std::string::npos);
    const Activations uneven({3, 2, 8, 8}, 100, 6);
    EXPECT_NE(error_of([&] { observe_in_blocks(moments, 9, uneven, 100); }).find("3 query heads"), std::string::npos);
}

TEST(Gram, QuadraticFormsUseTheUpperTriangle) {
    const double nan = std::nan("");
    const Vector a{2, 1, 3, nan, 5, -1, nan, nan, 4}, x{1, 2, -1, 0.5, 0, 2};
    Vector out(2);
    quadratic_forms(x.data(), 2, 3, a.data(), out.data());
    EXPECT_DOUBLE_EQ(out[0], 2 + 20 + 4 + 2 * (2 - 3 + 2));
    EXPECT_DOUBLE_EQ(out[1], 0.5 + 16 + 2 * 3);
}

TEST(BitReversal, IsTheOfficialPermutation) {
    EXPECT_EQ(bit_reversal(8), (std::vector<int>{7, 3, 5, 1, 6, 2, 4, 0}));
    EXPECT_EQ(bit_reversal(1), (std::vector<int>{0}));
    EXPECT_EQ(bit_reversal(6), (std::vector<int>{5, 4, 3, 2, 1, 0}));
    for (const int d : {64, 96, 128, 256}) {
        auto perm = bit_reversal(d);
        std::sort(perm.begin(), perm.end());
        for (int i = 0; i < d; ++i) {
            EXPECT_EQ(perm[i], i);
        }
    }
}

Vector multiply(const Vector& a, const Vector& b, int d) {
    Vector c(size_t(d) * d);
    for (int i = 0; i < d; ++i) {
        for (int k = 0; k < d; ++k) {
            for (int j = 0; j < d; ++j) {
                c[i * d + j] += a[i * d + k] * b[k * d + j];
            }
        }
    }
    return c;
}

Vector transpose(const Vector& a, int d) {
    Vector t(a.size());
    for (int i = 0; i < d; ++i) {
        for (int j = 0; j < d; ++j) {
            t[j * d + i] = a[i * d + j];
        }
    }
    return t;
}

Vector rotation_of(const Vector& moment, int d, Composition c) {
    const auto r = rotation(moment, d, c);
    return Vector(r.begin(), r.end());
}

// C = U diag(1, 2, ..., d) U^T for the rotation U that a known matrix gives.
TEST(Rotation, FindsEigenvectorsInAscendingOrder) {
    const double c = std::cos(0.3), s = std::sin(0.3);
    // Eigenvalue 1 along (c, -s, 0), 5 along (s, c, 0), 3 along (0, 0, 1).
    const Vector moment{c * c + 5 * s * s, 4 * s * c, 0, 4 * s * c, s * s + 5 * c * c, 0, 0, 0, 3};
    const Vector expected{c, 0, s, -s, 0, c, 0, 1, 0};  // columns, the largest component positive
    const Vector r = rotation_of(moment, 3, Composition::r);
    for (size_t i = 0; i < r.size(); ++i) {
        EXPECT_NEAR(r[i], expected[i], 1e-6);
    }
}

TEST(Rotation, CompositionsAreProducts) {
    for (const int d : {8, 12, 64}) {
        const Activations a({1, 1, d, d}, 3 * d, 7);
        const Vector moment = batch(a, 0, 0).kk;
        const std::vector<float> hf = hadamard(d);
        const Vector h(hf.begin(), hf.end()), u = rotation_of(moment, d, Composition::r);
        Vector p(size_t(d) * d), identity(size_t(d) * d);
        const auto perm = bit_reversal(d);
        for (int j = 0; j < d; ++j) {
            p[perm[j] * d + j] = 1;
            identity[j * d + j] = 1;
        }
        const auto near = [&](Composition c, const Vector& expected) {
            EXPECT_LT(relative_distance(rotation_of(moment, d, c), expected), 1e-6) << name(c) << " " << d;
        };
        near(Composition::r_h, multiply(u, h, d));
        near(Composition::r_h_pbr, multiply(multiply(u, h, d), p, d));
        near(Composition::h_pbr, multiply(h, p, d));
        near(Composition::h, h);
        near(Composition::pbr, p);
        EXPECT_LT(relative_distance(multiply(transpose(u, d), u, d), identity), 1e-6);
    }
}

TEST(Rotation, DiagonalisesTheMomentOfItsTarget) {
    const LayerShape shape{4, 2, 16, 16};
    const Activations a(shape, 600, 8);
    Moments moments(0);
    moments.observe(0, shape, a.block(0, a.n));
    const int d = 16;
    const auto off_diagonal = [&](std::span<const float> r, const Vector& moment) {
        const Vector u(r.begin(), r.end());
        Vector c = multiply(multiply(transpose(u, d), moment, d), u, d);
        for (int i = 1; i < d; ++i) {
            EXPECT_LE(c[(i - 1) * d + i - 1], c[i * d + i] + 1e-4);
        }
        const double all = norm(c);
        for (int i = 0; i < d; ++i) {
            c[i * d + i] = 0;
        }
        return norm(c) / all;
    };
    const auto field = [&](Target target, int h) {
        const HeadMoments m = moments.head(0, h);
        switch (target) {
            case Target::qqt:
                return m.qq;
            case Target::ktk:
                return m.kk;
            case Target::sst:
                return m.sst;
            case Target::sst_true:
                return m.sst_true;
            case Target::vtv:
                return m.vv;
        }
        return m.qq;
    };
    const auto mean = [&](Target target) {
        Vector x = field(target, 0);
        const Vector y = field(target, 1);
        for (size_t i = 0; i < x.size(); ++i) {
            x[i] = (x[i] + y[i]) / 2;
        }
        return x;
    };
    for (const Target k : {Target::qqt, Target::ktk}) {
        for (const Target v : {Target::sst, Target::sst_true, Target::vtv}) {
            const Artefact shared = fit(moments, {k, v, Composition::r, false}, {});
            EXPECT_EQ(shared.layers.at(0).k_rotation.heads, 1);
            EXPECT_LT(off_diagonal(shared.layers.at(0).k_rotation.head(1), mean(k)), 1e-5);
            EXPECT_LT(off_diagonal(shared.layers.at(0).v_rotation.head(1), mean(v)), 1e-5);
            const Artefact apart = fit(moments, {k, v, Composition::r, true}, {});
            for (int h = 0; h < 2; ++h) {
                EXPECT_LT(off_diagonal(apart.layers.at(0).k_rotation.head(h), field(k, h)), 1e-5);
                EXPECT_LT(off_diagonal(apart.layers.at(0).v_rotation.head(h), field(v, h)), 1e-5);
            }
        }
    }
}

TEST(Fit, GivesMeansAndRefusesNonsense) {
    const LayerShape shape{4, 2, 8, 8};
    Activations a(shape, 200, 9);
    Moments moments(0);
    moments.observe(3, shape, a.block(0, a.n));
    const Artefact artefact = fit(moments, {}, {});
    for (int h = 0; h < 2; ++h) {
        const Vector expected = batch(a, h, 0).key_mean;
        for (int i = 0; i < 8; ++i) {
            EXPECT_NEAR(artefact.layer(3).k_mean.head(h)[i], expected[i], 1e-6);
        }
    }
    EXPECT_NE(error_of([&] {
                  fit(moments, {Target::sst, Target::sst}, {});
              }).find("K takes qqt or ktk"),
              std::string::npos);
    for (const char* other : {"qqq", "sst"}) {  // each side has its own
        EXPECT_NE(error_of([&] { find_key_target(other); }).find("choose one of qqt, ktk"), std::string::npos);
        EXPECT_EQ(error_of([&] { find_key_target(other); }).find("vtv"), std::string::npos);
    }
    EXPECT_TRUE(error_of([&] { find_value_target("qqt"); }).ends_with("choose one of sst, sst_true, vtv"));
    EXPECT_EQ(find_key_target("ktk"), Target::ktk);
    EXPECT_EQ(find_value_target("vtv"), Target::vtv);
    EXPECT_EQ(find_composition("r_h_pbr"), Composition::r_h_pbr);
    EXPECT_EQ(describe(RotationMethod{}), "K qqt and V sst_true, r_h_pbr, per layer");
    a.q[17] = NAN;
    moments.observe(3, shape, a.block(0, a.n));
    EXPECT_NE(error_of([&] { fit(moments, {}, {}); }).find("layer 3: the second moment has the value nan"),
              std::string::npos);
}

// Page p has the number p in all its rows.
TEST(PageSums, SamplesEveryNthPageOfALongText) {
    PageSums sums(4, 4);
    for (int page = 0; page < 2 * kSamplePages + 3; ++page) {
        const std::vector<float> rows(kPageTokens * 4, float(page));
        const HeadRows source{rows.data(), 4, 4};
        sums.add(source, source, 0, kPageTokens, uint64_t(page) * kPageTokens, page % kFolds);
    }
    const auto sample = sums.sample();
    ASSERT_EQ(sample.size(), size_t(kSamplePages / 2 + 1));
    for (size_t i = 0; i < sample.size(); ++i) {
        ASSERT_EQ(sample[i].k.size(), size_t(kPageTokens * 4)) << i;
        ASSERT_EQ(sample[i].v.size(), size_t(kPageTokens * 4)) << i;
        EXPECT_EQ(to_float(sample[i].k[0]), 4.0f * float(i));
        EXPECT_EQ(sample[i].fold, int(4 * i) % kFolds);
    }
}

}  // namespace
}  // namespace crumb
