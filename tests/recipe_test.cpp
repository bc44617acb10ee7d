// The table of recipes, the static tables made from a recipe, and what a page decodes to.
#include <crumb/error.h>
#include <crumb/recipe.h>
#include <gtest/gtest.h>

#include <set>

#include "encoder_cases.h"

using namespace crumb;

namespace {

template <class Action>
std::string error_of(Action action) {
    try {
        action();
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

void expect_orthonormal(std::span<const float> matrix, int dim) {
    for (int i = 0; i < dim; ++i) {
        for (int j = 0; j < dim; ++j) {
            double dot = 0;
            for (int c = 0; c < dim; ++c) {
                dot += double(matrix[size_t(i) * dim + c]) * matrix[size_t(j) * dim + c];
            }
            ASSERT_NEAR(dot, i == j, 1e-6);
        }
    }
}

std::vector<HeadTables> tables_of(const Recipe& recipe, int layer, int n_head_kv, int dim_k, int dim_v,
                                  const Artefact* artefact) {
    return layer_tables(recipe, layer, n_head_kv, page_format(recipe, dim_k, dim_v), artefact);
}

}  // namespace

TEST(Recipes, TheTableIsComplete) {
    std::set<std::string_view> names;
    for (const Recipe& recipe : recipes()) {
        EXPECT_TRUE(names.insert(recipe.name).second) << recipe.name;
        EXPECT_FALSE(recipe.summary.empty()) << recipe.name;
        EXPECT_EQ(find_recipe(recipe.name), recipe);
        EXPECT_EQ(recipe.k.quantiser == Quantiser::bf16, recipe.v.quantiser == Quantiser::bf16) << recipe.name;
        EXPECT_EQ(recipe.v.centre, Centre::none) << recipe.name << ": the mean of V is never removed";
        for (int dim = 32; dim <= 256 && !recipe.budgeted(); dim += 16) {
            check(page_format(recipe, dim, dim));
        }
    }
    const std::set<std::string_view> expected = {
        "bf16",    "q8",         "q8:paper",      "int4",          "int4:paper",    "int2",      "int2:paper",
        "quarot",  "saw4",       "quarot:paper",  "saw4:paper",    "rotatekv",      "oscar",     "rotatekv:paper",
        "turbo2",  "turbo3",     "turbo2:paper",  "turbo3:paper",  "oscar:paper",   "turbo4",    "turbo4:paper",
        "turbo2+", "turbo3+",    "turbo2+:paper", "turbo3+:paper", "turbo4+",       "kivi32",    "turbo4+:paper",
        "kivi128", "ott",        "kitty",         "kvarn",         "kvarn:paper",   "omni",      "omni:paper",
        "had2",    "omni:layer", "omni:layer:paper", "planes"};
    EXPECT_EQ(names, expected);
}

// ":paper" differs from the default in nothing but the key mean.
TEST(Recipes, PaperRowsKeepTheKeyMean) {
    for (const Recipe& recipe : recipes()) {
        if (!recipe.name.ends_with(":paper")) {
            continue;
        }
        const Recipe& ours = find_recipe(recipe.name.substr(0, recipe.name.rfind(':')));
        SideRecipe k = ours.k;
        EXPECT_EQ(k.centre, Centre::key_mean);
        k.centre = Centre::none;
        EXPECT_EQ(recipe.k, k);
        EXPECT_EQ(recipe.v, ours.v);
        EXPECT_TRUE(ours.needs_artefact());
    }
    EXPECT_FALSE(find_recipe("quarot:paper").needs_artefact());
    EXPECT_TRUE(find_recipe("oscar:paper").needs_artefact());
    EXPECT_FALSE(find_recipe("had2").needs_artefact());
}

TEST(Recipes, BitsPerElement) {
    const auto bits = [](std::string_view name) { return page_format(find_recipe(name), 128, 128).bits_per_element(); };
    EXPECT_DOUBLE_EQ(bits("bf16"), 16.0);
    EXPECT_DOUBLE_EQ(bits("oscar"), 2.25);
    EXPECT_DOUBLE_EQ(bits("saw4"), 4.25);
    EXPECT_DOUBLE_EQ(bits("had2"), 2.0625);
    EXPECT_DOUBLE_EQ(bits("q8"), 8.25);
    EXPECT_DOUBLE_EQ(bits("kivi32"), 3.0);
    EXPECT_DOUBLE_EQ(bits("kivi128"), 2.25);
    EXPECT_DOUBLE_EQ(bits("omni"), 3.0625);       // a norm a token
    EXPECT_DOUBLE_EQ(bits("turbo2"), 2.125);
    EXPECT_DOUBLE_EQ(bits("turbo3+"), 3.125);
    EXPECT_DOUBLE_EQ(bits("kvarn"), 2.375);       // KVarN's own figure
    EXPECT_DOUBLE_EQ(bits("kitty"), 2.5078125);   // K: 0.5 for the high digits of a quarter, 1/64 for which they are
    EXPECT_DOUBLE_EQ(bits("ott"), 2.25 + 3.0 * (16 * 128 + 16) / (128 * 128));
    EXPECT_DOUBLE_EQ(page_format(find_recipe("kivi128"), 64, 64).bits_per_element(), 2.375);  // V in groups of 64
    EXPECT_DOUBLE_EQ(page_format(find_recipe("turbo3"), 80, 80).bits_per_element(), 8.0 * (128 * 16 + 128) / (64 * 80));
}

TEST(Recipes, SlowOnesAreThoseThatNoKernelReads) {
    for (const Recipe& recipe : recipes()) {
        EXPECT_EQ(recipe.slow(), !recipe.budgeted() && !page_format(recipe, 128, 128).planar()) << recipe.name;
        if (recipe.page_tokens > kPageTokens) {
            EXPECT_GE(recipe.paper.recent, recipe.page_tokens - kPageTokens) << recipe.name;
        }
    }
    for (const std::string_view fast : {"q8", "int4", "int2", "quarot", "rotatekv", "saw4", "oscar", "had2", "bf16"}) {
        EXPECT_FALSE(find_recipe(fast).slow()) << fast;
    }
}

TEST(Recipes, ErrorsSayWhatToType) {
    const std::string unknown = error_of([] { find_recipe("oskar"); });
    EXPECT_NE(unknown.find("'oskar'"), std::string::npos);
    for (const Recipe& recipe : recipes()) {
        EXPECT_NE(unknown.find(recipe.name), std::string::npos) << recipe.name;
    }

    EXPECT_NE(error_of([] { page_format(find_recipe("had2"), 128, 72); }).find("V heads of 72"), std::string::npos);

    const Recipe& oscar = find_recipe("oscar");
    const std::string missing = error_of([&] { tables_of(oscar, 0, 2, 64, 64, nullptr); });
    EXPECT_NE(missing.find("crumb calibrate"), std::string::npos);
    EXPECT_NE(missing.find("quarot:paper"), std::string::npos);
    EXPECT_EQ(missing.find("bf16"), std::string::npos);

    Artefact artefact = artefact_for(64, 64);
    EXPECT_EQ(error_of([&] { tables_of(oscar, 0, 2, 64, 64, &artefact); }), "");
    EXPECT_NE(error_of([&] { tables_of(oscar, 5, 2, 64, 64, &artefact); }).find("layer 5"), std::string::npos);
    EXPECT_NE(error_of([&] { tables_of(oscar, 0, 2, 64, 128, &artefact); }).find("128"), std::string::npos);
    EXPECT_NE(error_of([&] { tables_of(oscar, 0, 8, 64, 64, &artefact); }).find("8"), std::string::npos);
    EXPECT_EQ(missing.find("kivi"), std::string::npos);  // offers what attention reads in place alone
    Artefact imported = artefact;
    imported.layers[0].k_mean = {};
    EXPECT_NE(error_of([&] { tables_of(oscar, 0, 2, 64, 64, &imported); }).find("Take oscar:paper, or make"), std::string::npos);
    EXPECT_EQ(error_of([&] { tables_of(find_recipe("oscar:paper"), 0, 2, 64, 64, &imported); }), "");
    artefact.layers[0].v_rotation = {};
    EXPECT_NE(error_of([&] { tables_of(oscar, 0, 2, 64, 64, &artefact); }).find("value rotation"),
              std::string::npos);
    EXPECT_EQ(error_of([&] { tables_of(find_recipe("quarot"), 0, 2, 64, 64, &artefact); }), "");
}

TEST(Hadamard, Orthonormal) {
    for (int dim = 32; dim <= 256; dim += 16) {
        expect_orthonormal(hadamard(dim), dim);
    }
}

TEST(Hadamard, SylvesterOrderInBlocks) {
    const std::vector<float> two = hadamard(2), six = hadamard(6);
    const float h = std::sqrt(0.5f);
    EXPECT_EQ(two, (std::vector<float>{h, h, h, -h}));
    for (int block = 0; block < 3; ++block) {
        EXPECT_EQ(six[(2 * block + 1) * 6 + 2 * block + 1], -h);
    }
    EXPECT_EQ(six[2], 0.0f);
    const std::vector<float> eight = hadamard(8);
    EXPECT_LT(eight[3 * 8 + 5], 0.0f);  // 3 & 5 has one bit
    EXPECT_GT(eight[3 * 8 + 7], 0.0f);  // 3 & 7 has two
}

TEST(Tables, ArtefactMatricesGoToTheirHeads) {
    const Artefact artefact = artefact_for(64, 96);
    const LayerArtefact& layer = artefact.layers.at(0);
    const std::vector<HeadTables> heads = tables_of(find_recipe("oscar"), 0, kHeads, 64, 96, &artefact);
    ASSERT_EQ(heads.size(), size_t(kHeads));
    for (int head = 0; head < kHeads; ++head) {
        EXPECT_TRUE(std::ranges::equal(heads[head].k.mean, layer.k_mean.head(head)));
        EXPECT_TRUE(std::ranges::equal(heads[head].k.encode, layer.k_rotation.head(head)));
        EXPECT_TRUE(std::ranges::equal(heads[head].v.encode, layer.v_rotation.head(0)));
        EXPECT_TRUE(heads[head].v.mean.empty());
        EXPECT_TRUE(heads[head].k.sigma.empty() && heads[head].k.step.empty());
    }
    const std::vector<HeadTables> paper = tables_of(find_recipe("oscar:paper"), 0, kHeads, 64, 96, &artefact);
    EXPECT_TRUE(paper[1].k.mean.empty());
}

// Digit-major, padding last, whose rows are 0.
TEST(Tables, PlaneOrder) {
    const SideTables tables = tables_of(find_recipe("saw4:paper"), 0, 1, 80, 80, nullptr)[0].k;
    ASSERT_EQ(tables.format.planes, 160);
    for (int p = 0; p < 160; ++p) {
        EXPECT_EQ(tables.direction[p], p % 80);
        EXPECT_EQ(tables.digit[p], p / 80);
        for (int i = 0; i < 80; ++i) {
            ASSERT_EQ(tables.decode[size_t(p) * 80 + i],
                      tables.encode[size_t(i) * 80 + p % 80] * (p < 80 ? 1.0f : 4.0f));
        }
    }

    const SideTables padded = tables_of(find_recipe("had2"), 0, 1, 80, 80, nullptr)[0].k;
    ASSERT_EQ(padded.format.planes, 96);
    EXPECT_TRUE(padded.ones.empty());
    for (int p = 80; p < 96; ++p) {
        EXPECT_EQ(padded.direction[p], kNoDirection);
        for (int i = 0; i < 80; ++i) {
            ASSERT_EQ(padded.decode[size_t(p) * 80 + i], 0.0f);
        }
    }
}

// What attention needs: the mapped value of a direction d is one unit of code in its planes; `ones` is one unit of
// zero.
TEST(Tables, DecodeUndoesEncode) {
    for (const Recipe& recipe : encoder_recipes()) {
        for (int dim : {64, 80, 96}) {
            const EncoderCase c = encoder_case(recipe, dim, dim);
            for (const SideTables* tables : {&c.tables.k, &c.tables.v}) {
                const auto map = [&](std::span<const float> x, int j) {
                    double y = 0;
                    for (int i = 0; i < dim; ++i) {
                        y += tables->encode.empty() ? double(x[i]) * (i == j)
                                                    : double(x[i]) * tables->encode[size_t(i) * dim + j];
                    }
                    return y;
                };
                for (int p = 0; p < tables->format.planes; ++p) {
                    if (tables->direction[p] == kNoDirection) {
                        continue;
                    }
                    const double step = std::pow(4.0, tables->digit[p]) *
                                        (tables->step.empty() ? 1.0 : tables->step[tables->direction[p]]);
                    for (int j = 0; j < dim; ++j) {
                        const std::span<const float> row = std::span(tables->decode).subspan(size_t(p) * dim, dim);
                        ASSERT_NEAR(map(row, j), j == tables->direction[p] ? step : 0.0, 1e-5 * step);
                    }
                }
                if (tables->format.info != SideInfo::scale_zero) {
                    continue;
                }
                for (int j = 0; j < dim; ++j) {
                    ASSERT_NEAR(map(tables->ones, j), 1.0, 1e-5);
                }
            }
        }
    }
}

// Against the reading formula taken by direction, not by plane: T^-1 (s step (code - middle) + z) + means.
TEST(Decode, FollowsTheFormula) {
    std::mt19937 random(1);
    for (const Recipe& recipe : encoder_recipes()) {
        const int dim = 80;
        const EncoderCase c = encoder_case(recipe, dim, dim);
        const SideTables& tables = c.tables.k;
        std::vector<std::byte> page(c.format.bytes());
        encode_page(recipe, c.format, c.tables, rows_of(Rows::normal, dim, 1), rows_of(Rows::normal, dim, 2),
                    page.data());
        std::vector<uint8_t> digits(size_t(kPageTokens) * c.format.k.planes);
        for (uint8_t& digit : digits) {
            digit = random() % 4;
        }
        pack_keys(c.format.k.planes, digits, page.data() + c.format.key_codes());

        std::vector<float> rows(size_t(kPageTokens) * dim);
        decode_keys(c.format, tables, page.data(), rows);
        for (int t = 0; t < kPageTokens; ++t) {
            const TokenInfo info = key_info_at(c.format, tables, page.data(), t);
            std::vector<double> y(dim, info.zero);
            for (int j = 0; j < dim; ++j) {
                int code = 0;
                for (int digit = 0; digit < tables.digits[j]; ++digit) {
                    code += digits[size_t(t) * c.format.k.planes + digit * dim + j] << 2 * digit;
                }
                const double middle = ((1 << 2 * tables.digits[j]) - 1) / 2.0;
                y[j] += info.scale * (tables.step.empty() ? 1.0 : tables.step[j]) * (code - middle);
            }
            for (int i = 0; i < dim; ++i) {
                double x = tables.encode.empty() ? y[i] : 0.0;
                for (int j = 0; j < dim && !tables.encode.empty(); ++j) {
                    x += y[j] * tables.encode[size_t(i) * dim + j];
                }
                if (!tables.mean.empty()) {
                    x += tables.mean[i];
                }
                if (c.format.k.mean) {
                    x += double(int8_t(page[c.format.key_mean() + i])) * tables.mean_step[i];
                }
                ASSERT_NEAR(rows[size_t(t) * dim + i], x, 1e-5) << recipe.name;
            }
        }
    }
}

TEST(Decode, SideInformationLiesWhereTheFormatSays) {
    const Recipe& recipe = find_recipe("int2:paper");
    const EncoderCase c = encoder_case(recipe, 64, 64);
    std::vector<std::byte> page(c.format.bytes());
    auto* words = reinterpret_cast<uint16_t*>(page.data());
    for (int t = 0; t < kPageTokens; ++t) {
        words[c.format.key_info() / 2 + t] = to_fp16(float(t)).bits;
        words[c.format.key_info() / 2 + 64 + t] = to_fp16(100.0f + float(t)).bits;
        words[c.format.value_info() / 2 + t] = to_fp16(200.0f + float(t)).bits;
        words[c.format.value_info() / 2 + 64 + t] = to_fp16(300.0f + float(t)).bits;
    }
    for (int t = 0; t < kPageTokens; ++t) {
        const TokenInfo k = key_info_at(c.format, c.tables.k, page.data(), t),
                        v = value_info_at(c.format, c.tables.v, page.data(), t);
        EXPECT_EQ(k.scale, float(t));
        EXPECT_EQ(k.zero, 100.0f + float(t));
        EXPECT_EQ(v.scale, 200.0f + float(t));
        EXPECT_EQ(v.zero, 300.0f + float(t));
    }
}
