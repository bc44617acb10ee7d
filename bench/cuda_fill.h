// Device data for benchmarks: never zeros, which memory and tensor cores handle faster than real data.
#pragma once

#include <crumb/page.h>

namespace crumb::cuda {

// Pages of random codes with side information in plausible ranges, random means.
void fill_pages(std::byte* pages, size_t n_pages, const PageFormat& format);

// Random BF16 in +-[0.5, 1).
void fill_exact(std::byte* memory, size_t bytes);

// TB/s of a plain read of 4 GB, the best of a few: the roof that shares are shares of.
double read_roof();

}  // namespace crumb::cuda
