// Pages whose parameters belong to groups, whose levels are a table, or that keep tokens exact: against the methods as
// the papers have them (plain_methods.h), and byte by byte where bytes have a meaning of their own.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "encoder_cases.h"
#include "plain_methods.h"
#include "recipe/balance.h"
#include "recipe/encode.h"
#include "recipe/levels.h"

using namespace crumb;

namespace {

constexpr int kDims[] = {32, 64, 80, 96, 128, 256};

std::vector<const Recipe*> group_recipes() {
    std::vector<const Recipe*> found;
    for (const Recipe& recipe : recipes()) {
        if (recipe.slow()) {
            found.push_back(&recipe);
        }
    }
    return found;
}

std::vector<bf16> page_rows(const PageFormat& format, int dim, Rows kind, uint32_t seed) {
    std::vector<bf16> rows;
    for (int first = 0; first < format.tokens; first += kPageTokens) {
        const std::vector<bf16> more = rows_of(kind, dim, seed + uint32_t(first));
        rows.insert(rows.end(), more.begin(), more.end());
    }
    return rows;
}

struct Encoded {
    std::vector<std::byte> page;
    EncodeCounts counts;
};

std::vector<float> norms_of(const EncoderCase& c, std::span<const bf16> k) {
    std::vector<float> norms(c.format.tokens);
    add_key_energy(c.tables.k, k, norms);
    for (float& x : norms) {
        x = 2.0f * std::sqrt(x);  // as if three more heads were like this one
    }
    return norms;
}

Encoded encode(const Recipe& recipe, const EncoderCase& c, std::span<const bf16> k, std::span<const bf16> v,
               int keep = 0, const std::byte* kept = nullptr) {
    Encoded result = {std::vector<std::byte>(c.format.bytes(), std::byte{0xee}), {}};
    result.counts =
        encode_page(recipe, c.format, c.tables, k, v, result.page.data(), keep, kept, norms_of(c, k).data());
    return result;
}

std::vector<float> keys_of(const EncoderCase& c, const std::byte* page) {
    std::vector<float> rows(size_t(c.format.tokens) * c.format.k.dim);
    decode_keys(c.format, c.tables.k, page, rows);
    return rows;
}

std::vector<float> values_of(const EncoderCase& c, const std::byte* page) {
    std::vector<float> rows(size_t(c.format.tokens) * c.format.v.dim);
    decode_values(c.format, c.tables.v, page, rows);
    return rows;
}

// Centred and rotated in double precision, and back.
plain::Rows mapped(const SideTables& tables, std::span<const bf16> rows) {
    const size_t dim = size_t(tables.format.dim);
    plain::Rows y(rows.size() / dim, std::vector<double>(dim));
    for (size_t t = 0; t < y.size(); ++t) {
        for (size_t i = 0; i < dim; ++i) {
            const double x = double(to_float(rows[t * dim + i])) - (tables.mean.empty() ? 0.0 : tables.mean[i]);
            for (size_t j = 0; j < dim; ++j) {
                y[t][j] += x * (tables.encode.empty() ? double(i == j) : double(tables.encode[i * dim + j]));
            }
        }
    }
    return y;
}

std::vector<double> unmapped(const SideTables& tables, const plain::Rows& y) {
    const size_t dim = size_t(tables.format.dim);
    std::vector<double> x;
    for (const std::vector<double>& row : y) {
        for (size_t i = 0; i < dim; ++i) {
            double sum = tables.mean.empty() ? 0.0 : tables.mean[i];
            for (size_t j = 0; j < dim; ++j) {
                sum += row[j] * (tables.encode.empty() ? double(i == j) : double(tables.encode[i * dim + j]));
            }
            x.push_back(sum);
        }
    }
    return x;
}

// The row's name without what only changes the key mean.
std::string method_of(std::string_view name) {
    return std::string(name.ends_with(":paper") ? name.substr(0, name.size() - 6) : name);
}

std::vector<double> levels_of(const std::string& method) {
    switch (method[5]) {
        case '2':
            return {-1.5104, -0.4528, 0.4528, 1.5104};
        case '3':
            return {-2.1520, -1.3439, -0.7560, -0.2451, 0.2451, 0.7560, 1.3439, 2.1520};
        default:
            return {-2.7326, -2.0690, -1.6181, -1.2562, -0.9424, -0.6568, -0.3881, -0.1284,
                    0.1284,  0.3881,  0.6568,  0.9424,  1.2562,  1.6181,  2.0690,  2.7326};
    }
}

void quantise_plainly(const std::string& method, plain::Rows& k, plain::Rows& v, const std::vector<float>& norms) {
    if (method == "kivi32" || method == "kivi128") {
        const size_t group = method == "kivi32" ? 32 : 128;
        plain::kivi_keys(k, group);
        plain::kivi_values(v, group);
    } else if (method == "omni" || method == "omni:layer") {
        plain::omni_keys(k, method == "omni" ? std::vector<double>{} : std::vector<double>(norms.begin(), norms.end()));
        plain::omni_values(v);
    } else if (method.starts_with("turbo")) {
        plain::turbo(k, levels_of(method), method.ends_with("+"));
        plain::turbo(v, levels_of(method), method.ends_with("+"));
    } else if (method == "ott") {
        plain::ott(k, v);
    } else if (method == "kitty") {
        plain::kitty_keys(k);
        plain::kivi_values(v, 128);
    } else if (method == "kvarn") {
        plain::kvarn_keys(k);
        plain::kvarn_values(v);
    } else {
        FAIL() << "no plain form of " << method;
    }
}

// What we read differs from the plain method in values at a border between two codes (a step, in a few values of a
// thousand, so a few percent of the method's own error) and in what FP16 rounds away of offsets (2^-11 each). Where data
// lie on borders by themselves (`on_borders`: rows that are constant, or nearly, cancel when rotated), codes may differ and
// errors may not.
void expect_alike(const SideTables& tables, std::span<const bf16> rows, const std::vector<double>& expected,
                  const std::vector<float>& got, bool on_borders = false) {
    double energy = 0, error = 0, difference = 0, ours = 0;
    for (size_t n = 0; n < rows.size(); ++n) {
        const double x = to_float(rows[n]);
        const double mean = tables.mean.empty() ? 0.0 : tables.mean[n % tables.mean.size()];
        energy += x * x + mean * mean;
        error += (expected[n] - x) * (expected[n] - x);
        ours += (got[n] - x) * (got[n] - x);
        difference += (got[n] - expected[n]) * (got[n] - expected[n]);
    }
    const double rounding = 1e-6 * energy + double(rows.size()) * 0x1p-44;
    EXPECT_LE(difference, (on_borders ? 4.0 : 0.06) * error + rounding);
    EXPECT_LE(std::fabs(ours - error), 0.03 * error + rounding);
}

}  // namespace

TEST(GroupEncode, ReadsAsTheMethodsOfThePapers) {
    for (const Recipe* recipe : group_recipes()) {
        for (int dim : kDims) {
            if (dim > 80 && recipe->k.token_gain == TokenGain::balanced) {
                continue;  // sixteen rounds of logarithms are slow
            }
            const EncoderCase c = encoder_case(*recipe, dim, dim);
            for (Rows kind : {Rows::normal, Rows::offset, Rows::constant, Rows::outlier, Rows::zero, Rows::tiny,
                              Rows::uneven}) {
                if (dim == 256 && kind != Rows::normal) {
                    continue;  // the products of the plain method alone would take seconds
                }
                SCOPED_TRACE(fmt::format("{}, {} channels, {}", recipe->name, dim, name_of(kind)));
                const std::vector<bf16> k = page_rows(c.format, dim, kind, 1), v = page_rows(c.format, dim, kind, 2);
                const Encoded e = encode(*recipe, c, k, v);
                plain::Rows k_plain = mapped(c.tables.k, k), v_plain = mapped(c.tables.v, v);
                quantise_plainly(method_of(recipe->name), k_plain, v_plain, norms_of(c, k));
                const bool cancels = kind != Rows::normal && kind != Rows::outlier && kind != Rows::uneven;
                const bool on_borders = cancels && !c.tables.k.encode.empty();
                expect_alike(c.tables.k, k, unmapped(c.tables.k, k_plain), keys_of(c, e.page.data()), on_borders);
                expect_alike(c.tables.v, v, unmapped(c.tables.v, v_plain), values_of(c, e.page.data()), on_borders);
                EXPECT_EQ(e.counts, (EncodeCounts{.rows = 2 * uint64_t(c.format.tokens), .nonfinite = 0, .saturated = 0}));
                if (HasFailure()) {
                    return;
                }
            }
        }
    }
}

TEST(GroupEncode, HeadSizesMayDiffer) {
    for (const Recipe* recipe : group_recipes()) {
        const EncoderCase c = encoder_case(*recipe, 192, 128);
        const std::vector<bf16> k = page_rows(c.format, 192, Rows::normal, 1), v = page_rows(c.format, 128, Rows::normal, 2);
        const Encoded e = encode(*recipe, c, k, v);
        plain::Rows k_plain = mapped(c.tables.k, k), v_plain = mapped(c.tables.v, v);
        quantise_plainly(method_of(recipe->name), k_plain, v_plain, norms_of(c, k));
        expect_alike(c.tables.k, k, unmapped(c.tables.k, k_plain), keys_of(c, e.page.data()));
        expect_alike(c.tables.v, v, unmapped(c.tables.v, v_plain), values_of(c, e.page.data()));
    }
}

TEST(GroupEncode, TheSameBytesOnEveryLevel) {
    for (const Recipe* recipe : group_recipes()) {
        for (Rows kind : kAllRows) {
            const EncoderCase c = encoder_case(*recipe, 80, 80);
            const std::vector<bf16> k = page_rows(c.format, 80, kind, 1), v = page_rows(c.format, 80, kind, 2);
            const Encoded best = encode(*recipe, c, k, v);
            for (const lanes::Kernels* level : lanes::supported()) {
                Encoded other = {std::vector<std::byte>(c.format.bytes()), {}};
                other.counts = encode_page(*level, *recipe, c.format, c.tables, k, v, other.page.data(), 0, nullptr,
                                           norms_of(c, k).data());
                EXPECT_TRUE(other.page == best.page) << recipe->name << ", " << name_of(kind) << ", " << level->name;
                EXPECT_EQ(other.counts, best.counts);
            }
        }
    }
}

TEST(GroupEncode, NanCountsAsZeroAndNothingIsInfinite) {
    for (const Recipe* recipe : group_recipes()) {
        SCOPED_TRACE(recipe->name);
        const EncoderCase c = encoder_case(*recipe, 64, 64);
        std::vector<bf16> k = page_rows(c.format, 64, Rows::normal, 1), v = page_rows(c.format, 64, Rows::normal, 2);
        std::vector<bf16> clean = k;
        for (int i = 0; i < 3; ++i) {
            k[7 * 64 + i] = to_bf16(NAN);
            clean[7 * 64 + i] = to_bf16(0.0f);
        }
        const Encoded with_nan = encode(*recipe, c, k, v), without = encode(*recipe, c, clean, v);
        EXPECT_TRUE(with_nan.page == without.page);
        EXPECT_EQ(with_nan.counts.nonfinite, 3u);
        EXPECT_EQ(with_nan.counts.saturated, 0u);

        for (Rows kind : {Rows::nonfinite, Rows::huge}) {
            const std::vector<bf16> bad_k = page_rows(c.format, 64, kind, 1), bad_v = page_rows(c.format, 64, kind, 2);
            const Encoded bad = encode(*recipe, c, bad_k, bad_v);
            EXPECT_GT(bad.counts.saturated, 0u);
            for (const float x : keys_of(c, bad.page.data())) {
                ASSERT_TRUE(std::isfinite(x));
            }
            for (const float x : values_of(c, bad.page.data())) {
                ASSERT_TRUE(std::isfinite(x));
            }
        }
    }
}

// Kept rows keep their codes, and their groups their parameters: the same other rows give the same page. KVarN's gains
// of other tokens come from the kept ones instead, since the whole page is one group.
TEST(GroupEncode, KeptRowsComeFromTheOlderPage) {
    for (const Recipe* recipe : group_recipes()) {
        const EncoderCase c = encoder_case(*recipe, 64, 64);
        const std::vector<bf16> k = page_rows(c.format, 64, Rows::normal, 1), v = page_rows(c.format, 64, Rows::normal, 2);
        const Encoded older = encode(*recipe, c, k, v);
        for (int keep : {1, 20, 32, 63, c.format.tokens - 1, c.format.tokens}) {
            SCOPED_TRACE(fmt::format("{}, {} rows kept", recipe->name, keep));
            std::vector<bf16> k_lost = k, v_lost = v;
            std::fill_n(k_lost.begin(), size_t(keep) * 64, to_bf16(NAN));
            std::fill_n(v_lost.begin(), size_t(keep) * 64, to_bf16(1e30f));
            const Encoded again = encode(*recipe, c, k_lost, v_lost, keep, older.page.data());
            EXPECT_EQ(again.counts.nonfinite, 0u);
            Encoded in_place = older;
            encode_page(*recipe, c.format, c.tables, k_lost, v_lost, in_place.page.data(), keep, in_place.page.data(),
                        norms_of(c, k).data());
            EXPECT_TRUE(in_place.page == again.page);
            if (recipe->k.token_gain != TokenGain::balanced) {
                EXPECT_TRUE(again.page == older.page);
                EXPECT_EQ(again.counts.saturated, 0u);
            }
            const std::vector<float> before = keys_of(c, older.page.data()), after = keys_of(c, again.page.data());
            EXPECT_TRUE(std::equal(before.begin(), before.begin() + keep * 64, after.begin()));
            double error = 0, energy = 0;
            for (size_t n = size_t(keep) * 64; n < k.size(); ++n) {
                error += (after[n] - to_float(k[n])) * (after[n] - to_float(k[n]));
                energy += to_float(k[n]) * to_float(k[n]);
            }
            EXPECT_LE(error, 0.5 * energy);
        }
    }
}

TEST(GroupEncode, ValuesOutsideAKeptRangeAreCounted) {
    const Recipe& recipe = find_recipe("kivi32");
    const EncoderCase c = encoder_case(recipe, 64, 64);
    const std::vector<bf16> v = rows_of(Rows::normal, 64, 2);
    std::vector<bf16> k = rows_of(Rows::normal, 64, 1);
    const Encoded older = encode(recipe, c, k, v);
    for (size_t n = 20 * 64; n < k.size(); ++n) {
        k[n] = to_bf16(100.0f * to_float(k[n]));
    }
    EXPECT_EQ(encode(recipe, c, k, v, 20, older.page.data()).counts.saturated, 12u) << "tokens 20 to 31 share a group";
    EXPECT_EQ(encode(recipe, c, k, v, 32, older.page.data()).counts.saturated, 0u);
}

TEST(GroupEncode, GroupsDoNotKnowEachOther) {
    for (const std::string_view name : {"kivi32", "omni:paper"}) {
        const Recipe& recipe = find_recipe(name);
        const EncoderCase c = encoder_case(recipe, 64, 64);
        std::vector<bf16> k = rows_of(Rows::normal, 64, 1), v = rows_of(Rows::normal, 64, 2);
        const std::vector<float> before = keys_of(c, encode(recipe, c, k, v).page.data());
        for (size_t n = 32 * 64; n < k.size(); ++n) {
            k[n] = to_bf16(30.0f);
        }
        const std::vector<float> after = keys_of(c, encode(recipe, c, k, v).page.data());
        EXPECT_TRUE(std::equal(before.begin(), before.begin() + 32 * 64, after.begin())) << name;
    }
}

// Where a number of the info lies, tried out by writing it.
TEST(GroupEncode, InfoLiesWhereTheFormatSays) {
    const auto write = [](std::vector<std::byte>& page, size_t at, float x) {
        const fp16 half = to_fp16(x);
        std::memcpy(&page[at], &half, sizeof half);
    };
    const EncoderCase kivi = encoder_case(find_recipe("kivi32"), 64, 64);
    std::vector<std::byte> page(kivi.format.bytes());  // codes 0: the middle of the range less 1.5 scales
    const size_t k = kivi.format.key_info(), v = kivi.format.value_info();
    write(page, k + 2 * (64 + 5), 2.0f);             // scale of tokens 32 to 63, channel 5
    write(page, k + 2 * 64 * 2 + 2 * (64 + 5), 7.0f);  // its zero
    write(page, v + 2 * (64 + 3), 4.0f);             // scale of channels 32 to 63, token 3
    write(page, v + 2 * 64 * 2 + 2 * (64 + 3), 1.0f);  // its zero
    const std::vector<float> keys = keys_of(kivi, page.data()), values = values_of(kivi, page.data());
    for (int t = 0; t < 64; ++t) {
        for (int j = 0; j < 64; ++j) {
            ASSERT_EQ(keys[t * 64 + j], t >= 32 && j == 5 ? 4.0f : 0.0f);
            ASSERT_EQ(values[t * 64 + j], t == 3 && j >= 32 ? -5.0f : 0.0f);
        }
    }

    const EncoderCase kitty = encoder_case(find_recipe("kitty"), 64, 64);
    page.assign(kitty.format.bytes(), std::byte{0});
    const InfoLayout at = info_layout(kitty.format.k, 128);
    write(page, kitty.format.key_info() + at.scale + 2 * 9, 1.0f);
    for (int b = 0; b < 16; ++b) {
        page[kitty.format.key_info() + at.boosted + b] = std::byte(b == 3 ? 9 : b < 3 ? b : 20 + b);
    }
    page[kitty.format.key_info() + at.boosted_codes + 3 * 32 + 100 / 4] = std::byte(2 << 2 * (100 % 4));
    const std::vector<float> boosted = keys_of(kitty, page.data());
    EXPECT_EQ(boosted[100 * 64 + 9], 4 * 2 - 7.5f);
    EXPECT_EQ(boosted[99 * 64 + 9], -7.5f);
    EXPECT_EQ(boosted[100 * 64 + 10], 0.0f);

    const EncoderCase ott = encoder_case(find_recipe("ott"), 64, 64);
    page.assign(ott.format.bytes(), std::byte{0});
    const InfoLayout out = info_layout(ott.format.v, 128);
    write(page, ott.format.value_info() + out.outlier_rows + 2 * (2 * 64 + 7), 3.0f);
    page[ott.format.value_info() + out.outlier_tokens + 2 * 2] = std::byte(127);
    const std::vector<float> exact = values_of(ott, page.data());
    EXPECT_EQ(exact[127 * 64 + 7], 3.0f);
    EXPECT_EQ(exact[126 * 64 + 7], 0.0f);
}

// A page may come from a file: places in it lead nowhere else.
TEST(GroupEncode, ForgedPagesAreRead) {
    std::mt19937 random(1);
    for (const Recipe* recipe : group_recipes()) {
        const EncoderCase c = encoder_case(*recipe, 64, 64);
        for (int i = 0; i < 20; ++i) {
            std::vector<std::byte> page(c.format.bytes());
            for (std::byte& b : page) {
                b = std::byte(random());
            }
            keys_of(c, page.data());
            values_of(c, page.data());
            const std::vector<bf16> rows = page_rows(c.format, 64, Rows::normal, 1);
            encode(*recipe, c, rows, rows, 40, page.data());
        }
    }
}

// Every level is the mean of the normal variable's values that are nearest to it; errors of Max (1960).
TEST(Levels, AreThoseOfTheBestQuantiserOfANormalVariable) {
    for (const auto& [name, best] : {std::pair{"turbo2:paper", 0.1175}, std::pair{"turbo3:paper", 0.03454},
                                     std::pair{"turbo4:paper", 0.009497}}) {
        const Recipe recipe = find_recipe(name);
        const std::vector<float> levels =
            layer_tables(recipe, 0, 1, page_format(recipe, 64, 64), nullptr)[0].k.levels;
        double error = 0;
        for (size_t l = 0; l < levels.size(); ++l) {
            const double low = l == 0 ? -8 : 0.5 * (levels[l - 1] + levels[l]);
            const double high = l + 1 == levels.size() ? 8 : 0.5 * (levels[l] + levels[l + 1]);
            double mass = 0, mean = 0;
            constexpr int kSteps = 20000;
            for (int i = 0; i < kSteps; ++i) {
                const double x = low + (high - low) * (i + 0.5) / kSteps;
                const double p = std::exp(-x * x / 2) / std::sqrt(2 * M_PI) * (high - low) / kSteps;
                mass += p;
                mean += p * x;
                error += p * (x - levels[l]) * (x - levels[l]);
            }
            EXPECT_NEAR(levels[l], mean / mass, 2e-4) << name << " level " << l;
        }
        EXPECT_NEAR(error, best, 2e-4 * best + 2e-5) << name;
    }
}

// Rows seven and columns five times as large as others: what is left is a third of either, sampling included.
TEST(Balance, MakesDeviationsAlike) {
    std::mt19937 random(1);
    std::normal_distribution<double> normal;
    plain::Rows x(128, std::vector<double>(64));
    std::vector<double> y, tokens(128), directions(64);
    for (size_t t = 0; t < 128; ++t) {
        for (size_t j = 0; j < 64; ++j) {
            x[t][j] = 5 * normal(random) * double(1 + t % 7) * double(1 + j % 5);
            y.push_back(x[t][j]);
        }
    }
    const auto spread = [](const std::vector<double>& d) { return std::ranges::max(d) / std::ranges::min(d); };
    for (const BalanceFirst first : {BalanceFirst::tokens, BalanceFirst::directions}) {
        balance(y, tokens, directions, first);
        plain::Rows rows = x;
        plain::divide_rows(rows, tokens);
        plain::Rows columns = plain::transposed(rows);
        plain::divide_rows(columns, directions);
        EXPECT_LE(spread(plain::deviations(columns)), 5.0 / 3);
        EXPECT_LE(spread(plain::deviations(plain::transposed(columns))), 7.0 / 3);
    }
}
