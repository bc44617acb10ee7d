// Codes and info of a side whose parameters belong to groups, whose levels are a table, or that keeps some tokens exact
// (page.h, family C). Plain scalar code: such recipes are read slowly as well.
#pragma once

#include <crumb/recipe.h>

#include "recipe/directions.h"

namespace crumb {

struct MappedRows {
    std::vector<float> y;           // [tokens][D], centred and mapped, within +-65504
    std::vector<uint8_t> saturated;  // [tokens]: had others
};

// Writes codes and info into `page`. Tokens below `keep` and what a group shares that has such tokens are taken over from
// `kept`, which may be `page`. outliers: for K, which tokens stay exact is written there; V takes the same. Returns the
// number of saturated rows from `keep` on: mapped values or gains beyond FP16, or values outside the range of a group
// that was taken over.
uint64_t encode_groups(const SideRecipe& recipe, const PageSide& side, MappedRows rows, int keep, const std::byte* kept,
                       const float* layer_norms, bool keys, std::vector<uint16_t>& outliers, std::byte* page);

}  // namespace crumb
