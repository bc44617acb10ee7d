// Why a model's keys are hard to code, from the second moments that calibration sums: how long they are, how much of them
// is one constant vector (a key bias: per-token formats waste their range on it until it is removed), and how unevenly the
// rest is spread over directions (what unequal widths can win, and equal ones lose).
#pragma once

#include <crumb/calibrate.h>

#include <vector>

namespace crumb {

struct KeyShape {
    int layer = 0;
    int head = 0;
    double norm = 0;        // root mean square length of a key
    double mean_share = 0;  // share of the mean key in the squared length, 0..1
    double unevenness = 0;  // arithmetic over geometric mean of the spectrum of keys less their mean; 1: even
    std::vector<double> spectrum;  // eigenvalues of the covariance over their mean, descending
    bool operator==(const KeyShape&) const = default;
};

KeyShape key_shape(const HeadMoments& moments, int dim, int layer, int head);

}  // namespace crumb
