// One HTML page of a verdict: tables and SVG plots, no script, nothing from elsewhere, light and dark, readable on a phone.
// It is well-formed XML too.
#pragma once

#include "eval/verdict.h"

#include <string>

namespace crumb {

std::string page(const Verdict& verdict);

}  // namespace crumb
