// Sums of outer products in double precision, the inner loop of calibration.
//
// Every element is a sum over rows in ascending order, products and sums rounded one by one: the result depends neither
// on the instruction set nor on block sizes. (A library GEMM picks its blocks, and with them the order of the sum, by
// the size of the machine's caches.)
#pragma once

#include <cstddef>

namespace crumb {

// c[i][j] += sum_t x[t][i] x[t][j] for j >= i; x is [n][d], c is [d][d]. What lies below the diagonal is scratch.
void add_gram(const double* x, int n, int d, double* c);

// x a x^T for each row of x, a symmetric and given by what lies on and above its diagonal.
void quadratic_forms(const double* x, int n, int d, const double* a, double* out);

}  // namespace crumb
