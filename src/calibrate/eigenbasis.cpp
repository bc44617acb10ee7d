#include "calibrate/eigenbasis.h"

#include <crumb/error.h>

#include <Eigen/Eigenvalues>
#include <cmath>

namespace crumb {

Eigenbasis eigenbasis(std::span<const double> matrix, int d) {
    CRUMB_ASSERT(matrix.size() == size_t(d) * d);
    Eigen::MatrixXd c(d, d);
    for (int i = 0; i < d; ++i) {
        for (int j = i; j < d; ++j) {
            const double x = matrix[size_t(i) * d + j];
            if (!std::isfinite(x)) {
                fail("the second moment has the value {} at row {}, column {}", x, i, j);
            }
            c(i, j) = c(j, i) = x;
        }
    }
    const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(c);
    if (solver.info() != Eigen::Success) {
        fail("the eigenvectors of a {} x {} second moment were not found", d, d);
    }
    Eigenbasis basis{std::vector<double>(d), std::vector<double>(size_t(d) * d)};
    for (int j = 0; j < d; ++j) {
        basis.values[j] = solver.eigenvalues()[j];
        double largest = 0;
        for (int i = 0; i < d; ++i) {
            const double x = solver.eigenvectors()(i, j);
            largest = std::abs(x) > std::abs(largest) ? x : largest;
        }
        for (int i = 0; i < d; ++i) {
            basis.vectors[size_t(i) * d + j] = solver.eigenvectors()(i, j) * (largest < 0 ? -1 : 1);
        }
    }
    return basis;
}

}  // namespace crumb
