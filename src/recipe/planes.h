// `planes`: which directions get how many digits, and which layers how many planes. Everything is computed from the
// artefact's spectra in double precision with the basic operations alone, so it is the same on every machine.
#pragma once

#include <crumb/artefact.h>
#include <crumb/recipe.h>

#include <cstdint>
#include <span>
#include <vector>

namespace crumb {

// The best uniform quantiser of a normal variable of variance 1, by base-4 digits: its step and mean squared error.
struct GaussianQuantiser {
    double step, error;
};
inline constexpr GaussianQuantiser kGaussian[] = {{1.0, 1.0}, {0.9957, 0.1188}, {0.3352, 0.01154}, {0.1041, 0.001041}};
inline constexpr int kMostDigits = 3;

// Digits of each direction of a head for `planes` planes: one after the other to the direction where the next digit
// lowers the expected error most, the first of equals.
std::vector<uint8_t> assign_digits(std::span<const float> spectrum, int planes);

struct PlanesLayer {
    int n_head_kv;
    const PlanesSide *k, *v;
};

// The pages of all layers. Every side begins with kPlaneStep planes; the next kPlaneStep go where they lower the expected
// loss most a bit, one side of one layer after the other, as long as the mean stays within recipe.rate bits an element,
// side information included. Throws Error if the first step is more already.
std::vector<PageFormat> planes_formats(std::span<const PlanesLayer> layers, const Recipe& recipe);

SideTables planes_tables(const PlanesSide& side, int head, const SideFormat& format);

// Planes in order, and B for them (tables.cpp): `inverse` is [D][D], row i is what one unit of direction i adds.
void finish_tables(SideTables& tables, std::span<const double> inverse);

}  // namespace crumb
