// The orthonormal Hadamard matrix in Sylvester's order: H[i][j] = (-1)^popcount(i & j) / sqrt(n). A head size that is
// no power of two gets blocks of its largest power-of-two divisor on the diagonal.
#include <crumb/error.h>
#include <crumb/recipe.h>

#include <bit>
#include <cmath>

namespace crumb {

std::vector<float> hadamard(int d) {
    CRUMB_ASSERT(d > 0);
    const int n = d & -d;
    const float entry = float(1.0 / std::sqrt(double(n)));
    std::vector<float> h(size_t(d) * d);
    for (int i = 0; i < d; ++i) {
        for (int j = i / n * n; j < i / n * n + n; ++j) {
            h[size_t(i) * d + j] = std::popcount(unsigned(i % n & j % n)) % 2 ? -entry : entry;
        }
    }
    return h;
}

}  // namespace crumb
