#include <crumb/recipe.h>

#include <gtest/gtest.h>

#include <cmath>
#include <random>

using namespace crumb;

TEST(Recipe, RelativeErrorOfNormalData) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (const Recipe& recipe : recipes()) {
        if (recipe.needs_artefact()) { continue; }
        for (int dim : {32, 64, 80, 96, 128, 256}) {
            const PageFormat format = page_format(recipe, dim, dim);
            const auto tables = layer_tables(recipe, 0, 1, dim, dim, nullptr);
            std::vector<bf16> k(64 * dim), v(64 * dim);
            for (auto& x : k) { x = to_bf16(normal(random)); }
            for (auto& x : v) { x = to_bf16(normal(random)); }
            std::vector<std::byte> page(format.bytes());
            const EncodeCounts counts = encode_page(recipe, format, tables[0], k, v, page.data());
            EXPECT_EQ(counts.nonfinite + counts.saturated, 0u);
            std::vector<float> kk(64 * dim), vv(64 * dim);
            decode_keys(format, tables[0].k, page.data(), kk);
            decode_values(format, tables[0].v, page.data(), vv);
            double error = 0, energy = 0;
            for (size_t i = 0; i < k.size(); ++i) {
                error += std::pow(kk[i] - to_float(k[i]), 2) + std::pow(vv[i] - to_float(v[i]), 2);
                energy += std::pow(to_float(k[i]), 2) + std::pow(to_float(v[i]), 2);
            }
            printf("%s %d %.2f bits %.5f\n", std::string(recipe.name).c_str(), dim, format.bits_per_element(), error / energy);
        }
    }
}
