// Which variations of a recipe say what a part of it is worth.
#pragma once

#include <crumb/recipe.h>

#include <string>
#include <vector>

namespace crumb {

struct Variation {
    std::string name;  // what follows the recipe's name and a colon
    std::string what;
    SideRecipe k, v;
};

// One side alone, the other at 8 bits by the range of a token; and without each stage that the recipe has, on both sides.
std::vector<Variation> variations(const Recipe& recipe);

}  // namespace crumb
