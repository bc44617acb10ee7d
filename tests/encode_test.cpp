// The encoder against the scalar specification, bit by bit and on every instruction set; rows that are kept; and what
// comes back, against error budgets that follow from the formats.
#include "recipe/encode.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "encoder_cases.h"
#include "recipe/levels.h"
#include "scalar_encoder.h"

using namespace crumb;

namespace {

constexpr int kDims[] = {32, 64, 80, 96, 128, 256};

struct Encoded {
    std::vector<std::byte> page;
    EncodeCounts counts;
};

Encoded encode(const lanes::Kernels& level, const Recipe& recipe, const EncoderCase& c, std::span<const bf16> k,
               std::span<const bf16> v, int keep = 0, const std::byte* kept = nullptr) {
    Encoded result = {std::vector<std::byte>(c.format.bytes(), std::byte{0xee}), {}};
    result.counts = encode_page(level, recipe, c.format, c.tables, k, v, result.page.data(), keep, kept);
    return result;
}

// What a page holds, by direction: codes from their digits, side info, page mean.
ScalarSide read_side(const EncoderCase& c, bool keys, const std::byte* page) {
    const SideTables& tables = keys ? c.tables.k : c.tables.v;
    const int dim = tables.format.dim, planes = tables.format.planes;
    std::vector<uint8_t> digits(size_t(kPageTokens) * planes);
    ScalarSide out;
    if (keys) {
        unpack_keys(planes, page + c.format.key_codes(), digits);
    } else {
        unpack_values(planes, page + c.format.value_codes(), digits);
    }
    out.codes.assign(size_t(kPageTokens) * dim, 0);
    for (int t = 0; t < kPageTokens; ++t) {
        for (int p = 0; p < planes; ++p) {
            const int digit = digits[size_t(t) * planes + p];
            if (tables.direction[p] == kNoDirection) {
                EXPECT_EQ(digit, 0) << "padding";
            } else {
                out.codes[size_t(t) * dim + tables.direction[p]] += digit << 2 * tables.digit[p];
            }
        }
        const TokenInfo info = keys ? key_info_at(c.format, tables, page, t) : value_info_at(c.format, tables, page, t);
        out.scale.push_back(info.scale);
        out.zero.push_back(info.zero);
    }
    for (int i = 0; tables.format.mean && i < dim; ++i) {
        out.page_mean.push_back(int(int8_t(page[(keys ? c.format.key_mean() : c.format.value_mean()) + i])));
    }
    return out;
}

void expect_same(const ScalarSide& expected, const ScalarSide& got) {
    EXPECT_EQ(expected.codes, got.codes);
    EXPECT_EQ(expected.scale, got.scale);
    EXPECT_EQ(expected.zero, got.zero);
    EXPECT_EQ(expected.page_mean, got.page_mean);
}

std::vector<float> decoded(const EncoderCase& c, bool keys, const std::byte* page) {
    std::vector<float> rows(size_t(kPageTokens) * (keys ? c.format.k.dim : c.format.v.dim));
    keys ? decode_keys(c.format, c.tables.k, page, rows) : decode_values(c.format, c.tables.v, page, rows);
    return rows;
}

// y of one decoded or original row in double precision: the side's means removed, mapped.
std::vector<double> mapped(const SideTables& tables, const ScalarSide& side, std::span<const double> row) {
    const int dim = tables.format.dim;
    std::vector<double> x(row.begin(), row.end()), y(dim);
    for (int i = 0; i < dim; ++i) {
        if (!tables.mean.empty()) {
            x[i] -= tables.mean[i];
        }
        if (tables.format.mean) {
            x[i] -= double(side.page_mean[i]) * tables.mean_step[i];
        }
    }
    if (tables.encode.empty()) {
        return x;
    }
    for (int j = 0; j < dim; ++j) {
        for (int i = 0; i < dim; ++i) {
            y[j] += x[i] * tables.encode[size_t(i) * dim + j];
        }
    }
    return y;
}

// The clip's threshold: an order statistic of |y|.
double threshold(const SideRecipe& recipe, std::vector<double> y) {
    for (double& value : y) {
        value = std::fabs(value);
    }
    std::sort(y.begin(), y.end());
    return y[std::min(int(recipe.clip * float(y.size())), int(y.size()) - 1)];
}

// Half a step inside the code range. Its ends are off by what FP16 rounds away of scale and zero; a clip moves y first.
// FP32 sums of D terms and their way back cost a part in 1e5 of the largest element.
void expect_within_half_a_step(const SideRecipe& recipe, const SideTables& tables, const ScalarSide& side,
                               std::span<const bf16> rows, std::span<const float> back) {
    const int dim = tables.format.dim;
    const double levels = 1 << recipe.bits, half = 0x1p-11, smallest = 0x1p-24;
    for (int t = 0; t < kPageTokens; ++t) {
        std::vector<double> x, x_hat;
        double largest = 0;
        for (int i = 0; i < dim; ++i) {
            x.push_back(to_float(rows[size_t(t) * dim + i]));
            x_hat.push_back(back[size_t(t) * dim + i]);
            largest = std::max(largest, std::fabs(x.back()));
        }
        const std::vector<double> y = mapped(tables, side, x), y_hat = mapped(tables, side, x_hat);
        const double clip = threshold(recipe, y), s = side.scale[t], z = std::fabs(side.zero[t]);
        const double budget =
            s / 2 + (levels - 1) * (s * half + smallest) + z * half + smallest + 1e-5 * (largest + 1e-6);
        for (int j = 0; j < dim; ++j) {
            ASSERT_LE(std::fabs(std::clamp(y[j], -clip, clip) - y_hat[j]), budget)
                << "token " << t << " direction " << j;
        }
    }
}

// Squared error over energy, averaged over the rows.
double relative_error(std::span<const bf16> rows, std::span<const float> back) {
    const size_t dim = rows.size() / kPageTokens;
    double total = 0;
    for (size_t t = 0; t < kPageTokens; ++t) {
        double error = 0, energy = 0;
        for (size_t n = t * dim; n < (t + 1) * dim; ++n) {
            const double x = to_float(rows[n]);
            error += (back[n] - x) * (back[n] - x);
            energy += x * x;
        }
        total += error / energy;
    }
    return total / kPageTokens;
}

}  // namespace

TEST(Encode, EqualsTheScalarSpecificationOnEveryLevel) {
    for (const Recipe& recipe : encoder_recipes()) {
        for (int dim : kDims) {
            const EncoderCase c = encoder_case(recipe, dim, dim);
            for (Rows kind : kAllRows) {
                SCOPED_TRACE(fmt::format("{}, {} channels, {}", recipe.name, dim, name_of(kind)));
                const std::vector<bf16> k = rows_of(kind, dim, 1), v = rows_of(kind, dim, 2);
                const ScalarSide expected_k = encode_scalar(recipe.k, c.tables.k, k),
                                 expected_v = encode_scalar(recipe.v, c.tables.v, v);
                const Encoded best = encode(lanes::best(), recipe, c, k, v);
                expect_same(expected_k, read_side(c, true, best.page.data()));
                expect_same(expected_v, read_side(c, false, best.page.data()));
                EXPECT_EQ(best.counts.rows, 128u);
                EXPECT_EQ(best.counts.nonfinite, expected_k.nonfinite + expected_v.nonfinite);
                EXPECT_EQ(best.counts.saturated, expected_k.saturated + expected_v.saturated);
                for (const lanes::Kernels* level : lanes::supported()) {
                    const Encoded other = encode(*level, recipe, c, k, v);
                    EXPECT_TRUE(other.page == best.page) << level->name << " differs from " << lanes::best().name;
                    EXPECT_EQ(other.counts, best.counts);
                }
                if (HasFailure()) {
                    return;
                }
            }
        }
    }
}

TEST(Encode, ShrunkRangeEqualsTheScalarSpecification) {
    const Recipe& recipe = find_recipe("rotatekv:paper");
    for (int dim : kDims) {
        const EncoderCase c = encoder_case(recipe, dim, dim);
        for (Rows kind : kAllRows) {
            SCOPED_TRACE(fmt::format("{} channels, {}", dim, name_of(kind)));
            const std::vector<bf16> k = rows_of(kind, dim, 1), v = rows_of(kind, dim, 2);
            const Encoded best = encode(lanes::best(), recipe, c, k, v);
            expect_same(encode_scalar(recipe.k, c.tables.k, k), read_side(c, true, best.page.data()));
            for (const lanes::Kernels* level : lanes::supported()) {
                EXPECT_TRUE(encode(*level, recipe, c, k, v).page == best.page) << level->name;
            }
        }
    }
}

TEST(Encode, MinmaxErrorIsWithinHalfAStep) {
    for (const Recipe& recipe : encoder_recipes()) {
        for (int dim : kDims) {
            const EncoderCase c = encoder_case(recipe, dim, dim);
            for (Rows kind : kAllRows) {
                if (kind == Rows::nonfinite || kind == Rows::huge) {
                    continue;
                }
                SCOPED_TRACE(fmt::format("{}, {} channels, {}", recipe.name, dim, name_of(kind)));
                const std::vector<bf16> k = rows_of(kind, dim, 3), v = rows_of(kind, dim, 4);
                const Encoded e = encode(lanes::best(), recipe, c, k, v);
                const auto check = [&](bool keys, const SideRecipe& side, std::span<const bf16> rows) {
                    if (side.quantiser != Quantiser::minmax) {
                        return;
                    }
                    expect_within_half_a_step(side, keys ? c.tables.k : c.tables.v, read_side(c, keys, e.page.data()),
                                              rows, decoded(c, keys, e.page.data()));
                };
                check(true, recipe.k, k);
                check(false, recipe.v, v);
                if (HasFailure()) {
                    return;
                }
            }
        }
    }
}

// The best uniform quantisers of a normal variable lose .1188, .01154 and .001041 of its variance at 2, 4 and 6 bits; a
// gain fitted to each token can only lower that, its 8-bit form (steps of 4.4 %) and 1 / 64 of sampling error raise it.
TEST(Encode, GainReachesTheGaussianError) {
    for (const auto& [bits, best] : {std::pair{2, 0.1188}, std::pair{4, 0.01154}, std::pair{6, 0.001041}}) {
        for (SideInfo info : {SideInfo::gain8, SideInfo::gain16}) {
            const Recipe recipe =
                stages("gain", gain_side(Map::hadamard, bits, info), gain_side(Map::rotation, bits, info));
            const EncoderCase c = encoder_case(recipe, 128, 128);
            const std::vector<bf16> k = rows_of(Rows::normal, 128, 5), v = rows_of(Rows::uneven, 128, 6);
            const Encoded e = encode(lanes::best(), recipe, c, k, v);
            EXPECT_LT(relative_error(k, decoded(c, true, e.page.data())), best * 1.02) << bits;
            EXPECT_LT(relative_error(v, decoded(c, false, e.page.data())), best * 1.02) << bits;
        }
    }
}

TEST(Encode, GainRangeFitsAndSaturationIsCounted) {
    const Recipe& recipe = find_recipe("had2");
    const EncoderCase c = encoder_case(recipe, 64, 64);
    const auto saturated = [&](std::span<const bf16> k, std::span<const bf16> v) {
        return encode(lanes::best(), recipe, c, k, v).counts.saturated;
    };
    const std::vector<bf16> normal = rows_of(Rows::normal, 64, 1);
    EXPECT_EQ(saturated(normal, rows_of(Rows::outlier, 64, 2)), 0u);
    EXPECT_LE(saturated(normal, rows_of(Rows::uneven, 64, 2)), 2u) << "rms 2^-8 is the lowest gain";

    std::vector<bf16> large = normal;
    for (bf16& x : large) {
        x = to_bf16(1000.0f * to_float(x));
    }
    EXPECT_EQ(saturated(large, rows_of(Rows::zero, 64, 1)), 128u);
}

TEST(Encode, ConstantAndZeroRowsComeBack) {
    const Recipe& recipe = find_recipe("int2:paper");
    const EncoderCase c = encoder_case(recipe, 80, 80);
    const std::vector<bf16> k = rows_of(Rows::constant, 80, 1), v = rows_of(Rows::zero, 80, 1);
    const Encoded e = encode(lanes::best(), recipe, c, k, v);
    const std::vector<float> k_hat = decoded(c, true, e.page.data()), v_hat = decoded(c, false, e.page.data());
    for (size_t n = 0; n < k.size(); ++n) {
        ASSERT_NEAR(k_hat[n], to_float(k[n]), 0x1p-23) << "BF16 constants of this size are FP16 numbers";
        ASSERT_NEAR(v_hat[n], 0.0f, 0x1p-24);
    }
}

TEST(Encode, NanCountsAsZeroInfiniteAsTheLargest) {
    const Recipe& recipe = find_recipe("int2:paper");
    const EncoderCase c = encoder_case(recipe, 32, 32);
    std::vector<bf16> k = rows_of(Rows::normal, 32, 1), v = rows_of(Rows::normal, 32, 2), clean = k;
    for (int i = 0; i < 3; ++i) {
        k[7 * 32 + i] = to_bf16(NAN);
        clean[7 * 32 + i] = to_bf16(0.0f);
    }
    const Encoded with_nan = encode(lanes::best(), recipe, c, k, v),
                  without = encode(lanes::best(), recipe, c, clean, v);
    EXPECT_TRUE(with_nan.page == without.page);
    EXPECT_EQ(with_nan.counts, (EncodeCounts{.rows = 128, .nonfinite = 3, .saturated = 0}));

    v[9 * 32 + 4] = to_bf16(-INFINITY);
    const Encoded infinite = encode(lanes::best(), recipe, c, clean, v);
    EXPECT_EQ(infinite.counts, (EncodeCounts{.rows = 128, .nonfinite = 1, .saturated = 1}));
    const std::vector<float> v_hat = decoded(c, false, infinite.page.data());
    EXPECT_NEAR(v_hat[9 * 32 + 4], -65504.0f, 40.0f);
    for (float x : v_hat) {
        ASSERT_TRUE(std::isfinite(x));
    }
}

// Kept rows take codes and side information from the older page, whatever the rows passed hold; with a page mean the
// others are coded around the older page's.
TEST(Encode, KeptRowsComeFromTheOlderPage) {
    for (const Recipe& recipe : encoder_recipes()) {
        for (int dim : {64, 96}) {
            SCOPED_TRACE(fmt::format("{}, {} channels", recipe.name, dim));
            const EncoderCase c = encoder_case(recipe, dim, dim);
            const std::vector<bf16> k = rows_of(Rows::normal, dim, 1), v = rows_of(Rows::normal, dim, 2);
            const Encoded older = encode(lanes::best(), recipe, c, k, v);
            for (int keep : {1, 20, 63, 64}) {
                std::vector<bf16> k_lost = k, v_lost = v;
                std::fill_n(k_lost.begin(), size_t(keep) * dim, to_bf16(NAN));
                std::fill_n(v_lost.begin(), size_t(keep) * dim, to_bf16(1e30f));
                const Encoded again = encode(lanes::best(), recipe, c, k_lost, v_lost, keep, older.page.data());
                EXPECT_TRUE(again.page == older.page) << keep;
                Encoded in_place = older;
                encode_page(recipe, c.format, c.tables, k_lost, v_lost, in_place.page.data(), keep,
                            in_place.page.data());
                EXPECT_TRUE(in_place.page == older.page) << keep;
                EXPECT_EQ(again.counts,
                          (EncodeCounts{.rows = 2 * (64 - uint64_t(keep)), .nonfinite = 0, .saturated = 0}));
            }
            const std::vector<bf16> k_new = rows_of(Rows::normal, dim, 7);
            const ScalarSide before = read_side(c, true, older.page.data()),
                             after = read_side(
                                 c, true,
                                 encode(lanes::best(), recipe, c, k_new, v, 20, older.page.data()).page.data());
            EXPECT_TRUE(std::equal(after.codes.begin(), after.codes.begin() + 20 * dim, before.codes.begin()));
            EXPECT_FALSE(
                std::equal(after.codes.begin() + 20 * dim, after.codes.end(), before.codes.begin() + 20 * dim));
            EXPECT_EQ(after.page_mean, before.page_mean);
        }
    }
}

// A token at a time and several at once, over what a page held before.
TEST(Encode, SingleRowsAreThoseOfThePage) {
    for (const Recipe& recipe : encoder_recipes()) {
        if (recipe.k.page_mean) {
            continue;
        }
        for (const auto& [dim_k, dim_v] : {std::pair{32, 80}, {256, 64}}) {
            const EncoderCase c = encoder_case(recipe, dim_k, dim_v);
            for (const Rows kind : kAllRows) {
                const std::vector<bf16> k = rows_of(kind, dim_k, 1), v = rows_of(kind, dim_v, 2);
                const Encoded whole = encode(lanes::best(), recipe, c, k, v);
                std::vector<std::byte> page(c.format.bytes(), std::byte{0xee});
                EncodeCounts counts;
                for (int first = 0, n = 1; first < kPageTokens; first += n, n = std::min(n + 1, kPageTokens - first)) {
                    counts += encode_rows(recipe, c.format, c.tables, std::span(k).subspan(size_t(first * dim_k), size_t(n * dim_k)),
                                          std::span(v).subspan(size_t(first * dim_v), size_t(n * dim_v)), first, page.data());
                }
                EXPECT_EQ(page == whole.page, true) << recipe.name << ", " << name_of(kind) << ", " << dim_k;
                EXPECT_EQ(counts, whole.counts) << recipe.name << ", " << name_of(kind);
            }
        }
    }
}

TEST(Encode, Bf16PagesHoldTheRows) {
    const Recipe& recipe = find_recipe("bf16");
    const EncoderCase c = encoder_case(recipe, 80, 64);
    const std::vector<bf16> k = rows_of(Rows::nonfinite, 80, 1), v = rows_of(Rows::nonfinite, 64, 2);
    const Encoded e = encode(lanes::best(), recipe, c, k, v);
    for (int t = 0; t < kPageTokens; ++t) {
        for (int i = 0; i < 80; ++i) {
            ASSERT_EQ(key_at(c.format, e.page.data(), t, i).bits, k[size_t(t) * 80 + i].bits);
        }
        for (int i = 0; i < 64; ++i) {
            ASSERT_EQ(value_at(c.format, e.page.data(), t, i).bits, v[size_t(t) * 64 + i].bits);
        }
    }
    const std::vector<bf16> other(k.size());
    EXPECT_TRUE(encode(lanes::best(), recipe, c, other, v, 64, e.page.data()).page == e.page);
}

// Directions of 0, 2, 4 and 6 bits in one side, as recipes with a learned allocation have them.
TEST(Encode, UnevenWidths) {
    constexpr int kDim = 64;
    const Recipe recipe =
        stages("uneven", gain_side(Map::rotation, 6, SideInfo::gain8), gain_side(Map::rotation, 6, SideInfo::gain8));
    EncoderCase c = encoder_case(recipe, kDim, kDim);
    SideTables& tables = c.tables.k;
    constexpr float kSteps[] = {1.0f, 0.9957f, 0.3352f, 0.1041f};
    int planes = 0;
    for (int i = 0; i < kDim; ++i) {
        tables.digits[i] = uint8_t(i % 4);
        tables.sigma[i] = 1.0f + 0.1f * float(i % 5);
        tables.step[i] = kSteps[i % 4] * tables.sigma[i];
        planes += i % 4;
    }
    ASSERT_EQ(planes, 96);
    c.format.k.planes = tables.format.planes = planes;
    tables.direction.clear(), tables.digit.clear(), tables.decode.clear();
    for (int digit = 0; digit < 3; ++digit) {
        for (int j = 0; j < kDim; ++j) {
            if (digit >= tables.digits[j]) {
                continue;
            }
            tables.direction.push_back(uint16_t(j));
            tables.digit.push_back(uint8_t(digit));
            for (int i = 0; i < kDim; ++i) {
                tables.decode.push_back(float(1 << 2 * digit) * tables.step[j] * tables.encode[size_t(i) * kDim + j]);
            }
        }
    }
    const std::vector<bf16> k = rows_of(Rows::normal, kDim, 1), v = rows_of(Rows::normal, kDim, 2);
    const Encoded e = encode(lanes::best(), recipe, c, k, v);
    expect_same(encode_scalar(recipe.k, tables, k), read_side(c, true, e.page.data()));
    // A quarter of the directions is lost, the others have .1188, .01154 and .001041 of their variance.
    EXPECT_NEAR(relative_error(k, decoded(c, true, e.page.data())), (1 + 0.1188 + 0.01154 + 0.001041) / 4, 0.02);
}
