// Sizes and offsets of a record, and what a format may be.
#include <crumb/error.h>
#include <crumb/page.h>

namespace crumb {

namespace {

constexpr int kMinDim = 32, kMaxDim = 256, kDimStep = 16;

size_t rows_bytes(const SideFormat& side, int tokens) {
    return side.coded() ? size_t(tokens) / 4 * side.planes : size_t(tokens) * side.dim * sizeof(bf16);
}

size_t info_bytes(const SideFormat& side, int tokens) { return side.coded() ? info_layout(side, tokens).bytes : 0; }

// Scales that a side has, as many as zeros.
size_t scales(const SideFormat& side, int tokens) {
    if (side.info == SideInfo::channels) {
        return size_t(tokens / side.group) * side.dim;
    }
    const int groups = side.group == 0 ? 1 : (side.dim + side.group - 1) / side.group;
    return size_t(groups) * tokens;
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
    if (!side.coded() && !side.planar()) {
        fail("{} side: BF16 rows have no groups, gains or chosen channels", name);
    }
}

// Of a page that is not planar.
void check_groups(const SideFormat& side, const char* name, int tokens) {
    const bool by_channel = side.info == SideInfo::channels;
    if (side.mean || side.info == SideInfo::gain8 || (side.info == SideInfo::gain16 && !side.lookup)) {
        fail("{} side: page means and gains of static steps do not go with parameters of groups", name);
    }
    if (by_channel && (side.group <= 0 || tokens % side.group != 0)) {
        fail("{} side: groups of {} tokens do not divide a page of {}", name, side.group, tokens);
    }
    if (side.group != 0 && !by_channel && (side.info != SideInfo::scale_zero || side.group < 0)) {
        fail("{} side: groups of {} directions need a scale and zero a token", name, side.group);
    }
    if (side.lookup && side.info != SideInfo::gain16) {
        fail("{} side: a table of levels needs a 16-bit gain a token", name);
    }
    if (side.token_gain && !by_channel) {
        fail("{} side: a gain a token beside a scale or gain a token says the same twice", name);
    }
    if (side.channel_gain && side.info != SideInfo::scale_zero) {
        fail("{} side: a gain a channel goes with a scale and zero a token", name);
    }
    if (side.boosted < 0 || side.boosted > side.dim || (side.boosted > 0 && !by_channel)) {
        fail("{} side: {} of {} directions with two more bits: they need parameters per channel", name, side.boosted,
             side.dim);
    }
    if (side.outliers < 0 || side.outliers > tokens) {
        fail("{} side: {} exact tokens in a page of {}", name, side.outliers, tokens);
    }
}

}  // namespace

InfoLayout info_layout(const SideFormat& side, int tokens) {
    InfoLayout at;
    const auto take = [&](size_t& part, size_t bytes) {
        part = at.bytes;
        at.bytes += bytes;
    };
    const size_t n = scales(side, tokens), dim = size_t(side.dim), outliers = size_t(side.outliers);
    const bool has_zero = side.info == SideInfo::scale_zero || side.info == SideInfo::channels;
    take(at.scale, side.info == SideInfo::gain8 ? n : n * sizeof(fp16));
    take(at.zero, has_zero ? n * sizeof(fp16) : 0);
    take(at.token_gain, side.token_gain ? size_t(tokens) * sizeof(fp16) : 0);
    take(at.channel_gain, side.channel_gain ? dim * sizeof(fp16) : 0);
    take(at.outlier_rows, outliers * dim * sizeof(fp16));
    take(at.outlier_tokens, outliers * sizeof(uint16_t));
    take(at.boosted_codes, size_t(side.boosted) * tokens / 4);
    take(at.boosted, size_t(side.boosted));
    return at;
}

size_t PageFormat::value_codes() const { return rows_bytes(k, tokens); }
size_t PageFormat::key_info() const { return value_codes() + rows_bytes(v, tokens); }
size_t PageFormat::value_info() const { return key_info() + info_bytes(k, tokens); }
size_t PageFormat::key_mean() const { return value_info() + info_bytes(v, tokens); }
size_t PageFormat::value_mean() const { return key_mean() + mean_bytes(k); }
size_t PageFormat::bytes() const { return value_mean() + mean_bytes(v); }

double PageFormat::bits_per_element() const { return 8.0 * double(bytes()) / (tokens * (k.dim + v.dim)); }

void check(const PageFormat& format) {
    check(format.k, "K");
    check(format.v, "V");
    if (format.k.coded() != format.v.coded()) {
        fail("K has {} planes and V has {}: a page is codes on both sides or BF16 on both", format.k.planes,
             format.v.planes);
    }
    if (format.tokens != kPageTokens && (format.tokens != 2 * kPageTokens || (format.k.planar() && format.v.planar()))) {
        fail("a page of {} tokens: pages hold {}, twice as many only with parameters per channel", format.tokens,
             kPageTokens);
    }
    if (format.coded() && !format.planar()) {
        check_groups(format.k, "K", format.tokens);
        check_groups(format.v, "V", format.tokens);
    }
    if (format.k.outliers != format.v.outliers) {
        fail("{} exact tokens of K and {} of V: they are the same tokens", format.k.outliers, format.v.outliers);
    }
}

PageFormat bf16_format(int dim_k, int dim_v) { return {.k = {.dim = dim_k}, .v = {.dim = dim_v}}; }

int padded_planes(int directions, int digits) {
    return (directions * digits + kPlaneStep - 1) / kPlaneStep * kPlaneStep;
}

}  // namespace crumb
