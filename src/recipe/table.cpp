// The table of recipes.
#include <crumb/error.h>
#include <crumb/recipe.h>

#include <algorithm>
#include <iterator>

namespace crumb {

namespace {

constexpr SideRecipe minmax(Centre centre, Map map, int bits, float clip = 1.0f) {
    return {.centre = centre,
            .map = map,
            .quantiser = Quantiser::minmax,
            .bits = bits,
            .clip = clip,
            .info = SideInfo::scale_zero};
}

constexpr SideRecipe gain(Map map, int bits) {
    return {.map = map, .quantiser = Quantiser::gain, .bits = bits, .info = SideInfo::gain8};
}

// The key mean is removed unless the row is the paper's own (":paper"): it changes no softmax, and models with a key
// bias collapse without it. The mean of V is never removed: tokens with a tiny V matter and would become minus the
// mean.
constexpr Recipe kRecipes[] = {
    {
        .name = "bf16",
        .summary = "16 bits, nothing lost: the baseline",
        .source = "",
        .k = {},
        .v = {},
    },
    {
        .name = "int2",
        .summary = "2 bits by the range of a token, key mean removed",
        .source = "round to nearest, as the baseline of KIVI (arXiv 2402.02750), section 3",
        .k = minmax(Centre::key_mean, Map::identity, 2),
        .v = minmax(Centre::none, Map::identity, 2),
    },
    {
        .name = "int2:paper",
        .summary = "2 bits by the range of a token",
        .source = "round to nearest, as the baseline of KIVI (arXiv 2402.02750), section 3",
        .k = minmax(Centre::none, Map::identity, 2),
        .v = minmax(Centre::none, Map::identity, 2),
    },
    {
        .name = "quarot",
        .summary = "Hadamard rotation, 2 bits by the range of a token, key mean removed",
        .source = "QuaRot (arXiv 2404.00456), KV cache, without its clip of the range",
        .k = minmax(Centre::key_mean, Map::hadamard, 2),
        .v = minmax(Centre::none, Map::hadamard, 2),
    },
    {
        .name = "quarot:paper",
        .summary = "Hadamard rotation, 2 bits by the range of a token",
        .source = "QuaRot (arXiv 2404.00456), KV cache, without its clip of the range",
        .k = minmax(Centre::none, Map::hadamard, 2),
        .v = minmax(Centre::none, Map::hadamard, 2),
    },
    {
        .name = "saw4",
        .summary = "Hadamard rotation, 4 bits by the range of a token, key mean removed",
        .source = "SAW-INT4 (arXiv 2604.19157), rotation of the whole head on K and V",
        .k = minmax(Centre::key_mean, Map::hadamard, 4),
        .v = minmax(Centre::none, Map::hadamard, 4),
    },
    {
        .name = "saw4:paper",
        .summary = "Hadamard rotation, 4 bits by the range of a token",
        .source = "SAW-INT4 (arXiv 2604.19157), rotation of the whole head on K and V",
        .k = minmax(Centre::none, Map::hadamard, 4),
        .v = minmax(Centre::none, Map::hadamard, 4),
    },
    {
        .name = "oscar",
        .summary = "learned rotations, clipped range of a token, 2 bits, key mean removed",
        .source = "OSCAR (arXiv 2605.17757), OSCAR-2 key mean",
        .k = minmax(Centre::key_mean, Map::rotation, 2, 0.96f),
        .v = minmax(Centre::none, Map::rotation, 2, 0.92f),
    },
    {
        .name = "oscar:paper",
        .summary = "learned rotations, clipped range of a token, 2 bits",
        .source = "OSCAR (arXiv 2605.17757)",
        .k = minmax(Centre::none, Map::rotation, 2, 0.96f),
        .v = minmax(Centre::none, Map::rotation, 2, 0.92f),
    },
    {
        .name = "had2",
        .summary = "Hadamard rotation, 2 bits, one 8-bit gain a token; needs no calibration",
        .source = "ours: Gaussian step, gain by least squares",
        .k = gain(Map::hadamard, 2),
        .v = gain(Map::hadamard, 2),
    },
};

bool needs_artefact(const SideRecipe& side) { return side.centre == Centre::key_mean || side.map == Map::rotation; }

SideFormat side_format(const SideRecipe& side, int dim) {
    if (side.quantiser == Quantiser::bf16) {
        return {.dim = dim};
    }
    return {.dim = dim, .planes = padded_planes(dim, side.bits / 2), .info = side.info, .mean = side.page_mean};
}

}  // namespace

bool Recipe::needs_artefact() const { return crumb::needs_artefact(k) || crumb::needs_artefact(v); }

std::span<const Recipe> recipes() { return kRecipes; }

const Recipe& find_recipe(std::string_view name) {
    const auto found = std::ranges::find(kRecipes, name, &Recipe::name);
    if (found != std::end(kRecipes)) {
        return *found;
    }
    std::string names;
    for (const Recipe& recipe : kRecipes) {
        names.append(names.empty() ? "" : ", ").append(recipe.name);
    }
    fail("there is no KV recipe '{}'. Recipes are: {}", name, names);
}

PageFormat page_format(const Recipe& recipe, int dim_k, int dim_v) {
    const PageFormat format = {.k = side_format(recipe.k, dim_k), .v = side_format(recipe.v, dim_v)};
    check(format);
    return format;
}

}  // namespace crumb
