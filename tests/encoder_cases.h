// Recipes, tables and rows for tests of the encoder: stages in every combination that matters, and data that hurts.
#pragma once

#include <crumb/artefact.h>
#include <crumb/recipe.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

namespace crumb {

inline constexpr int kHeads = 2;

inline std::vector<float> random_rotation(int dim, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    std::vector<std::vector<double>> rows(dim, std::vector<double>(dim));
    for (int i = 0; i < dim; ++i) {
        for (double& x : rows[i]) {
            x = normal(random);
        }
        for (int pass = 0; pass < 2; ++pass) {
            for (int j = 0; j < i; ++j) {
                double dot = 0;
                for (int c = 0; c < dim; ++c) {
                    dot += rows[i][c] * rows[j][c];
                }
                for (int c = 0; c < dim; ++c) {
                    rows[i][c] -= dot * rows[j][c];
                }
            }
        }
        double norm = 0;
        for (double x : rows[i]) {
            norm += x * x;
        }
        for (double& x : rows[i]) {
            x /= std::sqrt(norm);
        }
    }
    std::vector<float> flat;
    for (const auto& row : rows) {
        flat.insert(flat.end(), row.begin(), row.end());
    }
    return flat;
}

// Layer 0 of a model with kHeads KV heads: a key mean a head, one key rotation a head, one value rotation for all.
inline Artefact artefact_for(int dim_k, int dim_v) {
    Artefact artefact;
    LayerArtefact& layer = artefact.layers[0];
    layer.k_mean = {.heads = kHeads, .dim = dim_k, .data = {}};
    for (int i = 0; i < kHeads * dim_k; ++i) {
        layer.k_mean.data.push_back(0.25f * float(i % 13) - 1.0f);
    }
    layer.k_rotation = {.heads = kHeads, .dim = dim_k, .data = {}};
    for (int head = 0; head < kHeads; ++head) {
        const std::vector<float> rotation = random_rotation(dim_k, 100 + head);
        layer.k_rotation.data.insert(layer.k_rotation.data.end(), rotation.begin(), rotation.end());
    }
    layer.v_rotation = {.heads = 1, .dim = dim_v, .data = random_rotation(dim_v, 200)};
    return artefact;
}

inline Recipe stages(std::string_view name, SideRecipe k, SideRecipe v) {
    return {.name = name, .summary = "", .source = "", .k = k, .v = v};
}

inline SideRecipe minmax_side(Map map, int bits, float clip = 1.0f, Centre centre = Centre::none,
                              bool page_mean = false) {
    return {.centre = centre,
            .map = map,
            .quantiser = Quantiser::minmax,
            .bits = bits,
            .clip = clip,
            .info = SideInfo::scale_zero,
            .page_mean = page_mean};
}

inline SideRecipe gain_side(Map map, int bits, SideInfo info, bool page_mean = false) {
    return {.map = map, .quantiser = Quantiser::gain, .bits = bits, .info = info, .page_mean = page_mean};
}

// Every map, quantiser, width, kind of side information, with and without centre, clip and page mean.
inline std::vector<Recipe> encoder_recipes() {
    return {
        stages("minmax 2", minmax_side(Map::identity, 2), minmax_side(Map::hadamard, 2)),
        stages("minmax 2, clip, key mean", minmax_side(Map::rotation, 2, 0.96f, Centre::key_mean),
               minmax_side(Map::rotation, 2, 0.92f)),
        stages("minmax 4 and 6", minmax_side(Map::hadamard, 4), minmax_side(Map::identity, 6)),
        stages("minmax 8", minmax_side(Map::identity, 8), minmax_side(Map::signed_hadamard, 8)),
        stages("minmax 2, page mean", minmax_side(Map::hadamard, 2, 1.0f, Centre::key_mean, true),
               minmax_side(Map::identity, 2, 0.5f, Centre::none, true)),
        stages("gain 2", gain_side(Map::hadamard, 2, SideInfo::gain8), gain_side(Map::identity, 2, SideInfo::gain16)),
        stages("gain 4 and 6, page mean", gain_side(Map::identity, 4, SideInfo::gain16, true),
               gain_side(Map::rotation, 6, SideInfo::gain8, true)),
    };
}

struct EncoderCase {
    PageFormat format;
    HeadTables tables;
};

// Tables of head 1. No artefact carries the static steps of page means yet, so they are set here.
inline EncoderCase encoder_case(const Recipe& recipe, int dim_k, int dim_v) {
    Recipe without_means = recipe;
    without_means.k.page_mean = without_means.v.page_mean = false;
    const Artefact artefact = artefact_for(dim_k, dim_v);
    EncoderCase result = {page_format(recipe, dim_k, dim_v),
                          layer_tables(without_means, 0, kHeads, page_format(without_means, dim_k, dim_v), &artefact)[1]};
    const auto set_means = [](SideTables& tables, const SideFormat& format) {
        tables.format = format;
        for (int i = 0; format.mean && i < format.dim; ++i) {
            tables.mean_step.push_back(0.02f + 0.001f * float(i % 7));
        }
    };
    set_means(result.tables.k, result.format.k);
    set_means(result.tables.v, result.format.v);
    return result;
}

enum class Rows { normal, offset, constant, outlier, zero, nonfinite, huge, tiny, uneven };

inline constexpr Rows kAllRows[] = {Rows::normal, Rows::offset,    Rows::constant, Rows::outlier, Rows::zero,
                                    Rows::huge,   Rows::nonfinite, Rows::tiny,     Rows::uneven};

inline const char* name_of(Rows kind) {
    switch (kind) {
        case Rows::normal:
            return "normal";
        case Rows::offset:
            return "mean 300";
        case Rows::constant:
            return "constant rows";
        case Rows::outlier:
            return "one channel x 1000";
        case Rows::zero:
            return "zero";
        case Rows::nonfinite:
            return "NaN and infinite";
        case Rows::huge:
            return "1e30";
        case Rows::tiny:
            return "1e-30";
        case Rows::uneven:
            return "magnitudes from 2^-8 to 2^8";
    }
    return "";
}

// 64 rows of `dim` elements.
inline std::vector<bf16> rows_of(Rows kind, int dim, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<bf16> rows(size_t(kPageTokens) * dim);
    for (size_t n = 0; n < rows.size(); ++n) {
        const int token = int(n) / dim, channel = int(n) % dim;
        float x = normal(random);
        switch (kind) {
            case Rows::normal:
                break;
            case Rows::offset:
                x += 300.0f;
                break;
            case Rows::constant:
                x = 0.3f * float(token - 20);
                break;
            case Rows::outlier:
                x *= channel == 5 ? 1000.0f : 1.0f;
                break;
            case Rows::zero:
                x = 0.0f;
                break;
            case Rows::nonfinite:
                if (random() % 50 == 0) {
                    x = NAN;
                }
                if (random() % 50 == 0) {
                    x = x > 0 ? INFINITY : -INFINITY;
                }
                break;
            case Rows::huge:
                x *= 1e30f;
                break;
            case Rows::tiny:
                x *= 1e-30f;
                break;
            case Rows::uneven:
                x *= std::exp2(float(token) / 4.0f - 8.0f);
                break;
        }
        rows[n] = to_bf16(x);
    }
    return rows;
}

}  // namespace crumb
