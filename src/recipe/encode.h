// encode_page() with a chosen level of the inner loops, so that tests can hold them against each other.
#pragma once

#include <crumb/recipe.h>

#include "recipe/lanes/lanes.h"

namespace crumb {

EncodeCounts encode_page(const lanes::Kernels& kernels, const Recipe& recipe, const PageFormat& format,
                         const HeadTables& tables, std::span<const bf16> k, std::span<const bf16> v, std::byte* page,
                         int keep, const std::byte* kept, const float* layer_norms = nullptr);

}  // namespace crumb
