// The table of recipes.
#include <crumb/error.h>
#include <crumb/recipe.h>

#include <algorithm>
#include <charconv>
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

// About what the study measured `planes` at.
constexpr double kPlanesRate = 2.2;

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
    {
        .name = "planes",
        .summary = "bits where they buy most, one 8-bit gain a token, page means; planes:1.25 to planes:4 bits in all",
        .source = "ours: gradient metric, decorrelated, one budget for the model",
        .k = gain(Map::planes, 0),
        .v = gain(Map::planes, 0),
        .rate = kPlanesRate,
    },
};

bool needs_artefact(const SideRecipe& side) {
    return side.centre == Centre::key_mean || side.map == Map::rotation || side.map == Map::planes;
}

Recipe with_rate(Recipe recipe, std::string_view rate) {
    const auto [end, error] = std::from_chars(rate.data(), rate.data() + rate.size(), recipe.rate);
    if (error != std::errc{} || end != rate.data() + rate.size() ||
        !(recipe.rate >= kLeastRate && recipe.rate <= kMostRate)) {
        fail("KV recipe '{}' takes a rate from {} to {} bits an element, not '{}': for example {}:{}", recipe.name,
             kLeastRate, kMostRate, rate, recipe.name, kPlanesRate);
    }
    return recipe;
}

SideFormat side_format(const SideRecipe& side, int dim) {
    if (side.quantiser == Quantiser::bf16) {
        return {.dim = dim};
    }
    return {.dim = dim, .planes = padded_planes(dim, side.bits / 2), .info = side.info, .mean = side.page_mean};
}

}  // namespace

bool Recipe::needs_artefact() const { return crumb::needs_artefact(k) || crumb::needs_artefact(v); }

std::span<const Recipe> recipes() { return kRecipes; }

std::string label(const Recipe& recipe) {
    const auto row = std::ranges::find(kRecipes, recipe.name, &Recipe::name);
    const bool usual = row != std::end(kRecipes) && row->rate == recipe.rate;
    return usual ? std::string(recipe.name) : fmt::format("{}:{}", recipe.name, recipe.rate);
}

Recipe find_recipe(std::string_view name) {
    if (const auto found = std::ranges::find(kRecipes, name, &Recipe::name); found != std::end(kRecipes)) {
        return *found;
    }
    const size_t colon = std::min(name.find(':'), name.size());
    const auto row = std::ranges::find(kRecipes, name.substr(0, colon), &Recipe::name);
    if (row != std::end(kRecipes) && row->budgeted()) {
        return with_rate(*row, name.substr(colon + 1));
    }
    std::string names;
    for (const Recipe& recipe : kRecipes) {
        names.append(names.empty() ? "" : ", ").append(recipe.name);
    }
    fail("there is no KV recipe '{}'. Recipes are: {}", name, names);
}

PageFormat page_format(const Recipe& recipe, int dim_k, int dim_v) {
    if (recipe.budgeted()) {
        fail("pages of KV recipe '{}' differ by layer and depend on the model's artefact; take another recipe here",
             recipe.name);
    }
    const PageFormat format = {.k = side_format(recipe.k, dim_k), .v = side_format(recipe.v, dim_v)};
    check(format);
    return format;
}

}  // namespace crumb
