// Eigenvectors of symmetric matrices.
#pragma once

#include <span>
#include <vector>

namespace crumb {

struct Eigenbasis {
    std::vector<double> values;   // [d], ascending
    std::vector<double> vectors;  // [d][d], row major, column j belongs to value j
};

// Of a d x d matrix given by what lies on and above its diagonal. Deterministic: the largest component of each vector is
// positive. Throws Error if a value is not finite.
Eigenbasis eigenbasis(std::span<const double> matrix, int d);

}  // namespace crumb
