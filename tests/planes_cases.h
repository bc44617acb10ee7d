// Bases of `planes` for tests of what is built on them.
#pragma once

#include <crumb/artefact.h>

#include <cmath>

#include "recipe/planes.h"

namespace crumb {

// A side whose basis is the identity and whose variances fall by `decay` from one direction to the next.
inline PlanesSide side_with(int heads, int dim, double first, double decay, bool page_mean) {
    PlanesSide side;
    for (Matrices* m : {&side.encode, &side.decode, &side.spectrum, &side.step, &side.page_step}) {
        *m = {heads, dim, {}};
    }
    for (int h = 0; h < heads; ++h) {
        for (int i = 0; i < dim; ++i) {
            for (int j = 0; j < dim; ++j) {
                side.encode.data.push_back(float(i == j));
            }
            side.spectrum.data.push_back(float(first * std::pow(decay, i)));
            side.page_step.data.push_back(0.01f);
        }
        for (int digits = 1; digits <= 3; ++digits) {
            for (int i = 0; i < dim; ++i) {
                side.step.data.push_back(float(kGaussian[digits].step * std::pow(decay, i / 2.0)));
            }
        }
    }
    side.decode.data = side.encode.data;
    if (!page_mean) {
        side.page_step = {};
    }
    return side;
}

}  // namespace crumb
