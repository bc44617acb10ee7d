// KVarN's balance of a page: gains of tokens and of directions that make the deviations of its rows and of its columns
// alike (arXiv 2606.03458). Starting from gains of 1, sixteen times: divide by both, then multiply the gains of
// directions by the deviations over tokens, then those of tokens by the deviations over directions. Deviations are kept
// within 1e-3 .. 1e3, gains within e^-0.3 .. e^10. The best pair so far wins, by the largest over the smallest deviation
// of rows plus the same of columns.
#pragma once

#include <span>

namespace crumb {

// y [tokens][directions] in double precision; gains are written.
void balance(std::span<const double> y, std::span<double> tokens, std::span<double> directions);

}  // namespace crumb
