// Variations of recipes: one side alone is coded as in the recipe and the other next to exactly, and a stage that is left
// out is left out.
#include <crumb/error.h>
#include <crumb/recipe.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "encoder_cases.h"
#include "planes_cases.h"

namespace crumb {
namespace {

constexpr int kDim = 64;
constexpr double kEightBits = 1e-3;  // of the energy: steps of 1/255 of a range of about 5 deviations leave 3e-5

struct Decoded {
    std::vector<float> k, v;
};

Artefact artefact_with_planes() {
    Artefact artefact = artefact_for(kDim, kDim);
    artefact.layers[0].k_planes = side_with(kHeads, kDim, 1.0, 0.97, true);
    artefact.layers[0].v_planes = side_with(kHeads, kDim, 1.0, 0.99, false);
    return artefact;
}

std::vector<bf16> two_pages(uint32_t seed) {
    std::vector<bf16> rows = rows_of(Rows::normal, kDim, seed), more = rows_of(Rows::normal, kDim, seed + 1);
    rows.insert(rows.end(), more.begin(), more.end());
    return rows;
}

// What pages of a recipe's first head read as.
Decoded coded(const Recipe& recipe) {
    const Artefact artefact = artefact_with_planes();
    const CodedLayer layer = {0, kHeads, kDim, kDim};
    const PageFormat format = page_formats(recipe, std::span(&layer, 1), &artefact)[0];
    const HeadTables tables = layer_tables(recipe, 0, kHeads, format, &artefact)[0];
    const std::vector<bf16> k = two_pages(1), v = two_pages(3);
    const size_t n = size_t(format.tokens) * kDim;
    std::vector<float> norms;
    for (int t = 0; t < format.tokens; ++t) {
        norms.push_back(8.0f + float(t % 5));
    }
    std::vector<std::byte> page(format.bytes());
    encode_page(recipe, format, tables, std::span(k).first(n), std::span(v).first(n), page.data(), 0, nullptr, norms.data());
    Decoded result = {std::vector<float>(n), std::vector<float>(n)};
    decode_keys(format, tables.k, page.data(), result.k);
    decode_values(format, tables.v, page.data(), result.v);
    return result;
}

double error(std::span<const float> decoded, std::span<const bf16> rows) {
    double error = 0, energy = 0;
    for (size_t i = 0; i < decoded.size(); ++i) {
        error += std::pow(double(decoded[i]) - to_float(rows[i]), 2);
        energy += std::pow(double(to_float(rows[i])), 2);
    }
    return error / energy;
}

std::vector<std::string> names(const Recipe& recipe) {
    std::vector<std::string> result;
    for (const Recipe& ablation : ablations(recipe)) {
        result.emplace_back(ablation.name);
    }
    return result;
}

}  // namespace

TEST(Ablations, AreTheStagesThatARecipeHas) {
    EXPECT_EQ(names(find_recipe("bf16")), std::vector<std::string>());
    EXPECT_EQ(names(find_recipe("had2")), (std::vector<std::string>{"had2:K", "had2:V", "had2:no-map"}));
    EXPECT_EQ(names(find_recipe("oscar")),
              (std::vector<std::string>{"oscar:K", "oscar:V", "oscar:no-map", "oscar:no-clip", "oscar:paper"}));
    EXPECT_EQ(names(find_recipe("omni:layer")),
              (std::vector<std::string>{"omni:layer:K", "omni:layer:V", "omni:layer:no-map", "omni:layer:no-gain",
                                        "omni:layer:no-integer-zero", "omni:layer:paper"}));
    EXPECT_EQ(names(find_recipe("planes")), (std::vector<std::string>{"planes:K", "planes:V"}));
    EXPECT_TRUE(names(find_recipe("oscar:K")).empty());
}

TEST(Ablations, AreFoundByNameAndNotListed) {
    std::set<std::string_view> listed;
    for (const Recipe& recipe : recipes()) {
        listed.insert(recipe.name);
    }
    for (const Recipe& recipe : recipes()) {
        for (const Recipe& ablation : ablations(recipe)) {
            EXPECT_EQ(find_recipe(label(ablation)), ablation) << ablation.name;
            EXPECT_EQ(listed.contains(ablation.name), ablation.name.ends_with(":paper")) << ablation.name;
        }
    }
    const Recipe planes = ablations(find_recipe("planes:3"))[0];
    EXPECT_EQ(label(planes), "planes:K:3");
    EXPECT_EQ(find_recipe("planes:K:3"), planes);
    EXPECT_THROW(find_recipe("had2:no-clip"), Error);
}

TEST(Ablations, OneSideAloneIsThatSideOfTheRecipe) {
    const std::vector<bf16> k = two_pages(1), v = two_pages(3);
    for (const Recipe& recipe : recipes()) {
        if (!recipe.coded() || recipe.k.bits == 8) {
            continue;
        }
        const Decoded both = coded(recipe), only_k = coded(find_recipe(std::string(recipe.name) + ":K")),
                      only_v = coded(find_recipe(std::string(recipe.name) + ":V"));
        EXPECT_EQ(only_k.k, both.k) << recipe.name;
        EXPECT_EQ(only_v.v, both.v) << recipe.name;
        EXPECT_LT(error(only_k.v, v), kEightBits) << recipe.name;
        EXPECT_LT(error(only_v.k, k), kEightBits) << recipe.name;
        EXPECT_GT(error(both.v, v), 5 * kEightBits) << recipe.name;
    }
}

TEST(Ablations, AStageLeftOutMakesAnotherPage) {
    for (const Recipe& recipe : recipes()) {
        for (const Recipe& ablation : ablations(recipe)) {
            const Decoded with = coded(recipe), without = coded(ablation);
            EXPECT_TRUE(with.k != without.k || with.v != without.v) << ablation.name;
        }
    }
}

}  // namespace crumb
