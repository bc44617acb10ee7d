// Which compiled levels of the encoder's inner loops this machine can run.
#pragma once

#include <span>

#include "recipe/lanes/lanes.h"

namespace crumb::lanes {

// Ascending in speed; the first is always there.
std::span<const Kernels* const> supported();

// What encode_page() uses.
const Kernels& best();

}  // namespace crumb::lanes
