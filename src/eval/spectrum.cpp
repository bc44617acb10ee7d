#include "eval/spectrum.h"

#include <crumb/error.h>

#include <Eigen/Eigenvalues>

#include <algorithm>
#include <cmath>

namespace crumb {

KeyShape key_shape(const HeadMoments& moments, int dim, int layer, int head) {
    CRUMB_ASSERT(moments.kk.size() == size_t(dim) * dim && moments.key_mean.size() == size_t(dim));
    using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    Matrix covariance = Eigen::Map<const Matrix>(moments.kk.data(), dim, dim);
    const auto mean = Eigen::Map<const Eigen::VectorXd>(moments.key_mean.data(), dim);
    KeyShape shape;
    shape.layer = layer;
    shape.head = head;
    const double squared = covariance.trace();
    shape.norm = std::sqrt(std::max(0.0, squared));
    shape.mean_share = squared > 0 ? std::min(1.0, mean.squaredNorm() / squared) : 0;
    covariance -= mean * mean.transpose();
    const Eigen::VectorXd values = Eigen::SelfAdjointEigenSolver<Matrix>(covariance, Eigen::EigenvaluesOnly).eigenvalues();
    const double average = values.sum() / dim;
    if (!(average > 0)) { return shape; }  // keys that never change
    double logs = 0;
    for (int i = dim - 1; i >= 0; --i) {
        // A direction that is never used would make the geometric mean 0: a millionth of the average is as good as none.
        const double value = std::max(values[i] / average, 1e-6);
        shape.spectrum.push_back(value);
        logs += std::log(value);
    }
    shape.unevenness = std::exp(-logs / dim);
    return shape;
}

}  // namespace crumb
