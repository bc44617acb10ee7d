#include "calibrate/gram.h"

#include <algorithm>
#include <vector>

#include "base/clones.h"

namespace crumb {

namespace {

constexpr int kRows = 4, kColumns = 8;  // a tile of c that stays in registers

}  // namespace

CRUMB_CLONES void add_gram(const double* x, int n, int d, double* c) {
    for (int i = 0; i < d; i += kRows) {
        for (int j = i - i % kColumns; j < d; j += kColumns) {
            const int rows = std::min(kRows, d - i), columns = std::min(kColumns, d - j);
            if (rows < kRows || columns < kColumns) {
                for (int t = 0; t < n; ++t) {
                    for (int a = i; a < i + rows; ++a) {
                        for (int b = j; b < j + columns; ++b) {
                            c[a * d + b] += x[t * d + a] * x[t * d + b];
                        }
                    }
                }
                continue;
            }
            double tile[kRows][kColumns];
            for (int a = 0; a < kRows; ++a) {
                for (int b = 0; b < kColumns; ++b) {
                    tile[a][b] = c[(i + a) * d + j + b];
                }
            }
            for (int t = 0; t < n; ++t) {
                const double* left = x + t * d + i;
                const double* right = x + t * d + j;
                for (int a = 0; a < kRows; ++a) {
                    for (int b = 0; b < kColumns; ++b) {
                        tile[a][b] += left[a] * right[b];
                    }
                }
            }
            for (int a = 0; a < kRows; ++a) {
                for (int b = 0; b < kColumns; ++b) {
                    c[(i + a) * d + j + b] = tile[a][b];
                }
            }
        }
    }
}

CRUMB_CLONES void quadratic_forms(const double* x, int n, int d, const double* a, double* out) {
    std::vector<double> y(d);
    for (int t = 0; t < n; ++t) {
        const double* row = x + t * d;
        std::fill(y.begin(), y.end(), 0.0);
        for (int i = 0; i < d; ++i) {
            y[i] += 0.5 * row[i] * a[i * d + i];
            for (int j = i + 1; j < d; ++j) {
                y[j] += row[i] * a[i * d + j];
            }
        }
        double sum = 0;
        for (int j = 0; j < d; ++j) {
            sum += y[j] * row[j];
        }
        out[t] = 2.0 * sum;
    }
}

}  // namespace crumb
