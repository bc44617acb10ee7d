// The part of a page that one side of a recipe without a budget fills.
#pragma once

#include <crumb/recipe.h>

namespace crumb {

SideFormat side_format(const SideRecipe& side, int dim);

}  // namespace crumb
