#include "recipe/ablation.h"

#include <algorithm>

namespace crumb {

namespace {

struct Stage {
    const char *name, *what;
    void (*leave_out)(SideRecipe&);
};

constexpr Stage kStages[] = {
    {"no-map", "without its rotation",
     [](SideRecipe& side) { side.map = side.map == Map::planes ? Map::planes : Map::identity; }},
    {"no-clip", "with the whole range of a token", [](SideRecipe& side) { side.clip = side.shrink = 1.0f; }},
    {"no-gain", "without its gains",
     [](SideRecipe& side) {
         side.token_gain = TokenGain::none;
         side.channel_gain = false;
     }},
    {"no-integer-zero", "with zeros between levels", [](SideRecipe& side) { side.integer_zero = false; }},
    {"no-boost", "with the same bits for all channels", [](SideRecipe& side) { side.boosted = 0.0f; }},
    {"no-outliers", "without exact tokens in a page", [](SideRecipe& side) { side.outliers = 0; }},
};

// Next to nothing is lost, as far as a key has no large constant part: where there are tables of a model it is removed.
// Keys of a double page are coded by channel, as such pages have to be; exact tokens stay, they are the same for K and V.
SideRecipe eight_bit_keys(const Recipe& recipe) {
    if (recipe.page_tokens > kPageTokens) {
        return {.quantiser = Quantiser::channels, .bits = 8, .info = SideInfo::channels, .group = recipe.page_tokens,
                .outliers = recipe.k.outliers};
    }
    return {.centre = recipe.needs_artefact() ? Centre::key_mean : Centre::none,
            .quantiser = Quantiser::minmax,
            .bits = 8,
            .info = SideInfo::scale_zero};
}

SideRecipe eight_bit_values(const Recipe& recipe) {
    return {.quantiser = Quantiser::minmax, .bits = 8, .info = SideInfo::scale_zero, .outliers = recipe.v.outliers};
}

}  // namespace

std::vector<Variation> variations(const Recipe& recipe) {
    if (!recipe.coded()) {
        return {};
    }
    std::vector<Variation> all = {{"K", "K alone, V at 8 bits", recipe.k, eight_bit_values(recipe)},
                                  {"V", "V alone, K at 8 bits", eight_bit_keys(recipe), recipe.v}};
    for (const Stage& stage : kStages) {
        Variation without = {stage.name, stage.what, recipe.k, recipe.v};
        stage.leave_out(without.k);
        stage.leave_out(without.v);
        all.push_back(without);
    }
    std::erase_if(all, [&](const Variation& v) { return v.k == recipe.k && v.v == recipe.v; });
    return all;
}

}  // namespace crumb
