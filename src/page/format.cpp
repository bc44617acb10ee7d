// Sizes and offsets of a record, and what a format may be.
#include <crumb/error.h>
#include <crumb/page.h>

namespace crumb {

namespace {

constexpr int kMinDim = 32, kMaxDim = 256, kDimStep = 16;

size_t rows_bytes(const SideFormat& side) {
    return side.coded() ? size_t(kPageTokens) / 4 * side.planes : size_t(kPageTokens) * side.dim * sizeof(bf16);
}

size_t info_bytes(SideInfo info) {
    switch (info) {
        case SideInfo::none:
            return 0;
        case SideInfo::scale_zero:
            return kPageTokens * 2 * sizeof(fp16);
        case SideInfo::gain16:
            return kPageTokens * sizeof(fp16);
        case SideInfo::gain8:
            return kPageTokens;
    }
    CRUMB_ASSERT(false);
}

size_t mean_bytes(const SideFormat& side) { return side.mean ? size_t(side.dim) : 0; }

void check(const SideFormat& side, const char* name) {
    if (side.dim < kMinDim || side.dim > kMaxDim || side.dim % kDimStep != 0) {
        fail(
            "{} heads of {} channels have no page format: head sizes go from {} to {} in steps of {}. "
            "Keep this layer's cache at 16 bits",
            name, side.dim, kMinDim, kMaxDim, kDimStep);
    }
    if (side.planes < 0 || side.planes % kPlaneStep != 0 || side.planes > 4 * side.dim) {
        fail("{} planes a token for {} heads of {} channels: planes go up to {} (8 bits a channel) in steps of {}",
             side.planes, name, side.dim, 4 * side.dim, kPlaneStep);
    }
    if (side.coded() != (side.info != SideInfo::none)) {
        fail("{} side: {} planes with {} side information: codes need a scale or gain a token, BF16 rows have none",
             name, side.planes, side.info == SideInfo::none ? "no" : "per-token");
    }
    if (side.mean && !side.coded()) {
        fail("{} side: BF16 rows have no page mean", name);
    }
}

}  // namespace

size_t PageFormat::value_codes() const { return rows_bytes(k); }
size_t PageFormat::key_info() const { return value_codes() + rows_bytes(v); }
size_t PageFormat::value_info() const { return key_info() + info_bytes(k.info); }
size_t PageFormat::key_mean() const { return value_info() + info_bytes(v.info); }
size_t PageFormat::value_mean() const { return key_mean() + mean_bytes(k); }
size_t PageFormat::bytes() const { return value_mean() + mean_bytes(v); }

double PageFormat::bits_per_element() const { return 8.0 * double(bytes()) / (kPageTokens * (k.dim + v.dim)); }

void check(const PageFormat& format) {
    check(format.k, "K");
    check(format.v, "V");
    if (format.k.coded() != format.v.coded()) {
        fail("K has {} planes and V has {}: a page is codes on both sides or BF16 on both", format.k.planes,
             format.v.planes);
    }
}

PageFormat bf16_format(int dim_k, int dim_v) { return {.k = {.dim = dim_k}, .v = {.dim = dim_v}}; }

int padded_planes(int directions, int digits) {
    return (directions * digits + kPlaneStep - 1) / kPlaneStep * kPlaneStep;
}

}  // namespace crumb
